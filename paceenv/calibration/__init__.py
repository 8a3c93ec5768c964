"""Calibration: from a trace of a job to the parameters of its simulation, with error bars."""
