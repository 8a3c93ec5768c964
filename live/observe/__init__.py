"""Observation of a job: time stamps of PyTorch calls, and the place where the rank runs."""
