"""Profiles: time split, profile, perf and nsys passes."""
