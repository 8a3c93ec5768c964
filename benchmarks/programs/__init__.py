"""Benchmarks of steps as programs: both engines, an independent simulator, speed, and nulls."""
