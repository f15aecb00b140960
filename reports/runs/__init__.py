"""Several runs: compared, kept, joined."""
