"""``paceenv report``: one page about a traced job, for those who were not there."""
