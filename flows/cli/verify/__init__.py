"""`rankwise verify`."""
