"""The DAGs, which read like the method section of a paper."""
