"""What runs on each node of a job: the launcher, its registration, and the ranks that it starts."""
