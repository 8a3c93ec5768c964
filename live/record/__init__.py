"""What the agent leaves behind: trace, status files, metrics, summary."""
