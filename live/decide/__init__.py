"""What the agent does about it: policy, guard, paired blocks, and the delay itself."""
