"""One trace of what each rank recorded on its own clock, whatever the format."""
