"""The workloads that ranks measure, one module for each kind."""
