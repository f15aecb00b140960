"""`rankwise plan`, `plan-check` and `forecast`."""
