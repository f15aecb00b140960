"""Figures of cost and trade-offs."""
