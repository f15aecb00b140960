"""Coverage of the intervals, by simulation."""
