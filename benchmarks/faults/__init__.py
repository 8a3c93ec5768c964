"""Faults that are injected into real training jobs, with and without the live agent."""
