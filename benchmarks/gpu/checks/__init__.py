"""The checks: one module each, with a function `run(bench)`; listed in `benchmarks.gpu.catalog`."""
