"""Checkpoints of a training run: written, kept, found again, exported."""
