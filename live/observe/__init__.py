"""What the agent sees of a job: time stamps of PyTorch calls, and where the rank runs."""
