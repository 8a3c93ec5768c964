"""A small cluster on one machine: network namespaces as hosts, real TCP between them, real PyTorch jobs on it."""
