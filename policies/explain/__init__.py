"""``paceenv explain``: what a policy decides, as pictures and as a timeline."""
