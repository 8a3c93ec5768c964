"""A step as a program: typed by hand or made from a workload, laid on the links of a fabric, as the engine's tables."""
