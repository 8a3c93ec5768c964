"""What was seen in traces, dumps and profiles, without a model of what caused it."""
