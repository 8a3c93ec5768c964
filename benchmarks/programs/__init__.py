"""Benchmarks of steps as programs: both engines, an independent simulator, speed, nulls, and published jobs."""
