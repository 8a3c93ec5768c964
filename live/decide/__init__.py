"""Decisions of the agent: policy, guard, paired blocks, and the delay itself."""
