"""Where operators look: numbers in their dashboards and in the user's own run; a file for each."""
