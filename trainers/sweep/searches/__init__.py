"""How a sweep chooses what to try next; none of them imports Ray."""
