"""Sweeps: Ray Tune searches settings or hyperparameters. Only ``trainables`` and ``ray_tuner`` import Ray."""
