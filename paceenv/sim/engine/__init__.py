"""How a cluster is simulated: counter-based draws, noise, the shared fabric, and one compiled kernel over a batch."""
