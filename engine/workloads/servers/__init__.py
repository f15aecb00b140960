"""Servers that a launch measures, and what happens to them: commands, processes, answers, watching."""
