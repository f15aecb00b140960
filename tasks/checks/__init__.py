"""Checks before anything is measured, and verification of answers. Imports no Prefect."""
