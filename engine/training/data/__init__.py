"""What is trained on: examples, the batches of each step and rank, what is held out."""
