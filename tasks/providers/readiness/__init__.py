"""When rented nodes can be used: they run, answer over SSH and show their GPUs."""
