"""Fit constants and errors to measured rows."""
