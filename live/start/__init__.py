"""Starting a job with the agent: one process of it, or all of a node, and what is checked before."""
