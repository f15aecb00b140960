"""Load runs made by hand: requests whose every moment is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.common.arrays import Floats
from configs.load.arrivals import PoissonArrivals
from configs.load.job import Contents, Endpoint, LoadJob
from configs.load.samples import CHUNK_COLUMN, LAG_COLUMN, REQUEST_COLUMNS, FinishCode, LoadFacts, RequestOutcome
from reports.load.samples import LoadRun, in_order


def made_run(
    due: Any,
    ttft: Any,
    gap: Any = 0.01,
    tokens: int = 11,
    duration: float | None = None,
    late: Any = 0.0,
    contents: Contents | None = None,
    lag: Any = (0.0,),
    **columns: Any,
) -> LoadRun:
    """Requests of `tokens` chunks: the first `ttft` seconds after it was due, then one each `gap` seconds."""
    due = np.asarray(due, dtype=np.float64)
    count = len(due)
    first = due + ttft
    chunks = first[:, None] + np.arange(tokens) * np.broadcast_to(np.asarray(gap, dtype=np.float64), (count,))[:, None]
    whole = {name: np.full(count, np.nan) for name in REQUEST_COLUMNS} | {
        "scheduled_seconds": due,
        "started_seconds": due + late,
        "sent_seconds": due + late,
        "first_seconds": first,
        "last_seconds": chunks[:, -1] if tokens else first,
        "ended_seconds": chunks[:, -1] if tokens else first,
        "asked_new_tokens": np.full(count, float(tokens)),
        "new_tokens": np.full(count, float(tokens)),
        "prompt_tokens": np.full(count, 5.0),
        "chunks": np.full(count, float(tokens)),
        "conversation": np.arange(count, dtype=np.float64),
        "turn": np.zeros(count),
        "outcome": np.full(count, float(RequestOutcome.COMPLETED)),
        "finish": np.full(count, float(FinishCode.LENGTH)),
    }
    whole |= {name: np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)) for name, value in columns.items()}
    seconds = float(duration if duration is not None else due[-1])
    job = LoadJob(
        endpoint=Endpoint(url="http://host", model="m"),
        arrivals=PoissonArrivals(rate=max(0.01, count / max(seconds, 1e-3))),
        contents=contents or Contents(),
        duration_seconds=seconds,
    )
    failed = {"HTTP 503: busy": int((whole["outcome"] != RequestOutcome.COMPLETED).sum())}
    facts = LoadFacts(
        job=job,
        started_at="2026-01-01T00:00:00+00:00",
        issuing_seconds=seconds,
        wall_seconds=seconds,
        cpu_share=0.1,
        requests=count,
        connections=1,
        errors={message: number for message, number in failed.items() if number},
    )
    flat: Floats = chunks.ravel()
    return in_order(facts, whole, flat, np.asarray(lag, dtype=np.float64), "made")


def samples_of(runs: Sequence[LoadRun]) -> dict[str, Floats]:
    """The samples of a record of these runs, as a launch leaves them; a pass is all of them."""
    columns = {name: np.concatenate([run.columns[name] for run in runs]) for name in REQUEST_COLUMNS}
    columns |= {
        CHUNK_COLUMN: np.concatenate([run.chunk_seconds for run in runs]),
        LAG_COLUMN: np.concatenate([run.lag_seconds for run in runs]),
        "run_rate": np.array([run.facts.job.requested_rate for run in runs]),
        "run_issuing_seconds": np.array([run.facts.issuing_seconds for run in runs]),
        "run_wall_seconds": np.array([run.facts.wall_seconds for run in runs]),
        "run_requests": np.array([float(len(run)) for run in runs]),
        "run_lag_samples": np.array([float(len(run.lag_seconds)) for run in runs]),
        "pass_seconds": np.array([sum(run.facts.wall_seconds for run in runs)]),
    }
    return {f"0/{name}": column for name, column in columns.items()}
