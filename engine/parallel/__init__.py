"""Ranks that work on one model together: where each stands, and how they talk."""
