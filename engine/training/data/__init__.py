"""Training data: examples, the batches of each step and rank, validation rows."""
