"""Launches of one run: prepared, submitted, adopted, collected. Imports no Prefect."""
