"""One hour with a GPU: every check that needs one, as one command that wastes none of it.

    python -m benchmarks.gpu --budget-minutes 14 --out results/          # or make gpu-check
    python -m benchmarks.gpu --rehearse --out rehearsed/                # the same code on CPUs, with tiny shapes

Runs from a bare checkout, without Prefect and without a network. `benchmarks.gpu.running.needs` says what else must be
there, `make gpu-wheels` packs it. Results of a GPU become docs/measurements/gpu.md with
`python -m benchmarks.gpu.reporting.document`.
"""
