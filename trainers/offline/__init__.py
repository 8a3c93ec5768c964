"""Offline reinforcement learning: data sets in Minari's format, and a baseline that learns from one."""
