"""The simulator compared with published and measured numbers, one target file at a time."""
