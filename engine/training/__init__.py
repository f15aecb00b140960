"""Training: strategies, tasks, data, steps, checkpoints and what is told while it goes on."""
