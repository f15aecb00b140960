"""What the pipeline costs: seconds by phase, and two checkouts in turn."""
