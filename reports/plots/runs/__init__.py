"""Figures over several runs."""
