"""Timings, as ratios within one run."""
