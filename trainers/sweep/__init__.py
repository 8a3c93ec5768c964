"""Sweeps: settings or hyperparameters tried on Ray, recorded so that nothing is lost. Only ``tune`` imports Ray."""
