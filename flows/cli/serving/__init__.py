"""`rankwise serve` and `rankwise generate`."""
