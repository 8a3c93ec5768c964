"""From a trace to causes: what-if replay of a job's dependency graph, and names for what it shows."""
