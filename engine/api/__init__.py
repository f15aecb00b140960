"""The Python interface of the engine for scripts (docs/reference/python-api.md)."""
