"""Measurements of workload kind script: shipped studies, the probe, the performance gate, a first report."""
