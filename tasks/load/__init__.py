"""Runs of the load generator, one after another, without Prefect."""
