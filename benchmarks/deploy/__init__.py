"""`make bench-deploy`: deployments on this machine, an SSH host and instances of three clouds."""
