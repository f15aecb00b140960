"""Settings of a server, and what is deployed."""
