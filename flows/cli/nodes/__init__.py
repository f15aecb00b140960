"""Commands for machines: list-nodes, nodes, reap."""
