"""Parallelism: the grid of ranks, process groups, and transports for collectives."""
