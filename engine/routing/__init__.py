"""One address before several servers: the front of a deployment, and `rankwise route`."""
