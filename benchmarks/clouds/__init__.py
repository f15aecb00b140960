"""Studies on rented nodes: every cloud's API on this machine, a real host behind each instance. Needs root and sshd."""
