"""Looking at a run from outside: tables of its ranks, conditions for a pipeline, predictions."""
