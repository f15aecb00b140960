"""Figures of runs that are held against each other."""

from collections.abc import Mapping

import numpy as np

from reports.reading.run_figures import CellFigures, RunFigures

HOME = {"hostname": "a", "commit": "c0ffee0", "dirty": "False", "torch": "2.9", "variables.OMP_NUM_THREADS": "1"}


def around(middle: float, spread: float = 0.01, count: int = 10, seed: int = 1) -> list[float]:
    """Values whose logs are spread evenly around a middle, in random order."""
    values = middle * np.exp(np.linspace(-spread, spread, count))
    return [float(value) for value in np.random.default_rng(seed).permutation(values)]


def cell_of(key: str = "k1", status: str = "completed", **fields: object) -> CellFigures:
    """A cell; each of `figures` is a list of values by repeat."""
    named = fields.pop("figures", {"throughput": around(100)})
    assert isinstance(named, Mapping)
    figures = {name: dict(enumerate(values)) for name, values in named.items()}
    values = {
        "title": f"tiny, {key}",
        "unit": "tokens/s",
        "compared": True,
        "planned": 10,
        "failed": 0,
        "fields": {"workload.kind": "generate", "target": "local", "workload.batch_size": key},
        "environments": ("e1",) if status == "completed" else (),
        **fields,
    }
    return CellFigures(key=key, status=status, figures=figures if status == "completed" else {}, **values)  # type: ignore[arg-type]


def run_of(
    *cells: CellFigures, name: str = "a", environment: Mapping[str, str] | None = None, **fields: object
) -> RunFigures:
    values = {
        "study": "s",
        "started_at": "2026-11-21T10:00:00+00:00",
        "finished_at": None,
        "rules": {"measuring.warmup": "1"},
        "environments": {"e1": HOME | dict(environment or {})},
        **fields,
    }
    return RunFigures(name=name, cells={cell.key: cell for cell in cells}, **values)  # type: ignore[arg-type]
