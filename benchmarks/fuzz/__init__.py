"""Fuzzing of everything that Rankwise reads and somebody else wrote. `make fuzz` runs it; docs/reference/testing.md.

A module `run_*.py` contributes targets:

    def targets() -> dict[str, Callable[[bytes], object]]: ...      # name -> reads these bytes
    def seeds() -> dict[str, tuple[bytes, ...]]: ...                # optional: valid inputs to begin with

A target may raise ValueError, which is how a user is told; `oracle` says what else is a fault.
"""
