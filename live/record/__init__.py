"""The agent's records: trace, status files, metrics, summary."""
