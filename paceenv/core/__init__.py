"""What the simulator and a live job share, bit for bit: rules, timing, signals, trace, limits. Needs NumPy only."""
