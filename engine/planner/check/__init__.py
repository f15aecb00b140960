"""Check the planner against published measurements."""
