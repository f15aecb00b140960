"""Launches of this machine are forked from processes that have only imported (docs/explanation/launch.md)."""
