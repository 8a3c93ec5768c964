"""``paceenv report``: one page about a traced job."""
