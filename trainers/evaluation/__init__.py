"""``paceenv evaluate`` and ``paceenv scores``: policies compared on suites of clusters."""
