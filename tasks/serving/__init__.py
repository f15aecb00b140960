"""Serving a model on this machine: its settings, and the processes."""
