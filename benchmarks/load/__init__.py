"""`make bench-load`: lateness of the load generator, and a server for it that does nothing."""
