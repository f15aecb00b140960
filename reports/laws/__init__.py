"""Scaling laws: fitted, chosen, refused, put into words."""
