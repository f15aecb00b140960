"""Prompts as tokens, and timed passes over them."""
