"""Checkpoints of a training run: writing, retention, discovery, export."""
