"""`rankwise load`."""
