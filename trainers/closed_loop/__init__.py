"""``paceenv testbed loop``: predict on the simulator, measure on real sockets, report both."""
