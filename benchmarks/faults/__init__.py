"""Faults on a Slurm cluster, each provoked for real."""
