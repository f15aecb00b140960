"""What Prefect costs a run."""
