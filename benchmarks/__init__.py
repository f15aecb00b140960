"""Benchmarks and measurements of the project itself; outside the wheel, imported by nothing."""
