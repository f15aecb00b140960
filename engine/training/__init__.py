"""Training: strategies, tasks, data, steps, checkpoints and live metrics."""
