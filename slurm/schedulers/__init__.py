"""Adapters that submit, poll and cancel jobs, on this machine and under Slurm."""
