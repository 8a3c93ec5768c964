"""The simulator: what is simulated (cluster), how (engine), and the slow referee (reference)."""
