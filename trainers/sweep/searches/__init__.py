"""How a sweep chooses its next trials; no file here imports Ray."""
