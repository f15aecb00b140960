"""Where the time of a pass goes, in a pass of its own: traces, compute against communication, and the GPU's state.

`record` runs a workload under torch's profiler, `events` reads what it saw, `collectives` and `split` make figures
of that without knowing torch, `trace` writes what a person looks at, `gpu` samples clocks, power and temperature.
"""
