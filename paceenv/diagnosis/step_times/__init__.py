"""What step times alone tell of a job: how they vary, what of it recurs, and how much there is to win at most."""
