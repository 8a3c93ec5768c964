"""Experiments that check the product against known truth: recovery, causes, predictions."""
