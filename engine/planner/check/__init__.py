"""The planner held against figures that others published."""
