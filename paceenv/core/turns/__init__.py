"""How rules judge themselves on the job: turns with and without them, from the step time that all ranks see alike."""
