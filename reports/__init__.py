"""Records to numbers, numbers to text and plots: pure functions."""
