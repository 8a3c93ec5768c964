"""Sweeps: settings or hyperparameters tried on Ray, every trial on record. Only ``ray_trials`` imports Ray."""
