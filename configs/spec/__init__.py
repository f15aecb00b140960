"""The study file: cells, experiments, targets and their validation."""
