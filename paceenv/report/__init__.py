"""Pictures of a trace and of its diagnosis, each with the numbers behind it."""
