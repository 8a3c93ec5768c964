"""Commands of the command line that need nothing above ``paceenv``."""
