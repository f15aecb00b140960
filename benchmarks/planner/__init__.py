"""The planner against published and measured figures."""
