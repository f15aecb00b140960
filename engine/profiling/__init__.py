"""Profiling in a separate pass: traces, compute and communication shares, and the GPU's state.

`record` runs a workload under torch's profiler, `events` reads its events, `collectives` and `split` compute figures
without torch, `trace` writes a Chrome trace, `gpu` samples clocks, power and temperature.
"""
