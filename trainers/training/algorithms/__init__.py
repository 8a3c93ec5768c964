"""What learns: one file per family of algorithms, behind the interface in ``learner``."""
