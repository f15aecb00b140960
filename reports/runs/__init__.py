"""Several runs: comparison, history and joint reports."""
