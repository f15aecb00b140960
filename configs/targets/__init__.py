"""Targets: where cells run."""
