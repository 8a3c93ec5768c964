"""Which rank is late, since when, by how much, of what kind, and what late ranks have in common. NumPy only."""
