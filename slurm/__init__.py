"""Start, monitor and end jobs."""
