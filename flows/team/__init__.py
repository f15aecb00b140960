"""`rankwise team`: Prefect server, Prefect worker and schedules that stay, for a team on one machine."""
