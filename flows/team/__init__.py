"""`rankwise team`: a permanent Prefect server, worker and schedules for a team on one machine."""
