"""A step as a program from a trace: its transfers in order, what runs in the background, and the rates of its links."""
