"""``paceenv evaluate``: policies compared on suites of clusters."""
