"""Servers measured: ours beside others, in launches of real studies."""
