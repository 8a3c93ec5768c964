"""Real training jobs as the agent meets them: shapes of jobs with one slow rank, public scripts, 1,000 ranks."""
