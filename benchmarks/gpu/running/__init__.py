"""Checks run one after another, each a process of its own."""
