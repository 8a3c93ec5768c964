"""Durations split into components, one per cause, that multiply or add up to the trace."""
