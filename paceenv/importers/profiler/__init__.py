"""What the events of one rank's PyTorch profile mean: steps, collectives and activity, on the device and its host."""
