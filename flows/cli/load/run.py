"""Run what `rankwise load` was asked for, print it and write figures beside the samples."""

import itertools
import json
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.common.base import write_atomically
from configs.common.printable import plural, printable_lines
from configs.common.secrets import shown_url
from configs.load.objectives import RequestObjectives
from configs.load.samples import SAMPLES_FILE
from flows.cli.load.request import LoadRequest
from flows.cli.tables import print_table
from reports.load.json_form import run_json, search_json
from reports.load.metrics import serving_metrics
from reports.load.search import ProbedRate, SearchGoal
from reports.load.text import rate_table, search_sentence, search_table, served_latency_table, verdict_lines
from reports.load.verdict import judged
from reports.text import Table, number, percent
from tasks.load.run import run_load, search_max_rate

NO_RESULT = 3
FIGURES_FILE = "load.json"


def run_request(request: LoadRequest, out: Path | None, as_json: bool) -> int:
    """Run once, or search; the exit code. After an interrupt it says where the samples so far are."""
    folder = out or new_folder(Path("load") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))
    try:
        if request.goal is None:
            return _run(request, folder, as_json)
        assert request.objectives is not None
        return _search(request, request.objectives, request.goal, folder, as_json)
    except KeyboardInterrupt:
        kept = f": the samples so far are in {folder}" if any(folder.rglob(SAMPLES_FILE)) else ""
        print(f"interrupted{kept}", file=sys.stderr, flush=True)
        return 1


def _run(request: LoadRequest, folder: Path, as_json: bool) -> int:
    run = run_load(request.job, folder)
    figures = serving_metrics(run, request.objectives)
    judgement = judged(run, figures)
    data = run_json(figures, judgement, request.objectives)
    _write(folder, data)
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        endpoint = request.job.endpoint
        print(printable_lines(f"{endpoint.model} at {shown_url(endpoint.url)}, {figures.window.seconds:.4g} s counted"))
        _print(served_latency_table(figures))
        _print(rate_table(figures))
        for line in verdict_lines(figures, judgement):
            print(printable_lines(line))
        print(f"samples and figures: {folder}")
    return 0 if judgement.is_result else NO_RESULT


def new_folder(wanted: Path) -> Path:
    """Make a folder of this name, or of the next one that is free: two commands may begin in one second."""
    for place in itertools.count(1):
        folder = wanted if place == 1 else wanted.with_name(f"{wanted.name}-{place}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def _search(request: LoadRequest, objectives: RequestObjectives, goal: SearchGoal, folder: Path, as_json: bool) -> int:
    def tell(probe: ProbedRate, run: int) -> None:
        decision = {True: "passes", False: "fails", None: "undecided"}[probe.passes]
        text = f"run {run}: {number(probe.rate)} requests/s, {plural(probe.requests, 'request')} so far: {decision}"
        print(text, file=sys.stderr, flush=True)

    found = search_max_rate(request.job, objectives, goal, folder, tell)
    data = search_json(found, objectives)
    _write(folder, data)
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        _print(search_table(found))
        print(search_sentence(found, _objectives_text(objectives)))
        print(f"samples and figures: {folder}")
    return 0 if found.estimate is not None else NO_RESULT


def _objectives_text(objectives: RequestObjectives) -> str:
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end latency"}
    bounds = [f"{names[name]} up to {bound:g} s" for name, bound in objectives.bounds.items()]
    return f"{' and '.join(bounds)} for {percent(objectives.share)} of the requests"


def _print(table: Table) -> None:
    print_table(table.columns, table.rows, table.text_columns)


def _write(folder: Path, data: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FIGURES_FILE, json.dumps(data, indent=1) + "\n")
