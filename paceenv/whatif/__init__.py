"""What a job would do if it were changed: predicted by simulating its cluster, or by replaying its trace."""
