"""Training: overheads, and resumption after killed ranks."""
