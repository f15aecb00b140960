"""Figures of experiments."""
