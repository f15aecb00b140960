"""`rankwise verify` over several models and layouts: one table, or one list as JSON.

    rankwise verify --all-architectures --layout tp=2 --layout pp=2 --layout tp=2,pp=2

The reference of a model runs once, with the first layout, and is used for all layouts.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.common.execution import Layout
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import significant
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from flows.cli.console import set_width
from flows.cli.signals import sigterm_as_interrupt
from flows.cli.verify.run import EXIT_CODES, OTHER_ERROR, VerificationRequest, verified, working_folder
from flows.cli.verify.text import AGREES, DEFECT, FAILED, NOT_JUDGED, NOT_SUPPORTED, VerificationOutcome
from tasks.checks.verification import Verification, kind_of
from tasks.checks.verification_inputs import VerificationSpec
from tasks.models.sources import TransientFetchError

LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2))
"""Default layouts of --all-architectures."""
_WIDTH = 160
_UNKNOWN = "—"


@dataclass(frozen=True)
class VerificationRow:
    """A model in a layout. worst: the statistic closest to its limit, in units of noise. difference: the largest
    difference of logits or of an encoder's states, and that of the noise. None: no verdict.
    """

    model: str
    kind: str | None
    layout: str
    verdict: str
    reason: str
    worst: str | None = None
    worst_times_noise: float | None = None
    limit_times_noise: float | None = None
    difference: float | None = None
    noise_difference: float | None = None
    not_reached: tuple[str, ...] = ()


def layout_of(written: str) -> Layout:
    """Parse a layout such as `tp=2,pp=2`. Raises ValueError."""
    try:
        parts = [part.split("=") for part in written.split(",")]
        degrees = {axis.strip(): int(degree) for axis, degree in parts}
        if set(degrees) - {"dp", "tp", "pp"} or len(degrees) < len(parts):
            raise ValueError(written)
        return Layout(**degrees)
    except ValueError as error:
        raise ValueError(f"--layout: got {written}, expected a layout such as tp=2, pp=2 or dp=1,tp=2,pp=2") from error


def run_table(
    models: list[str], layouts: list[Layout], asked: VerificationSpec, keep: Path | None, as_json: bool
) -> int:
    """Verify each model in each layout, print the table, and return the exit code of the worst outcome.

    What is named twice is verified once. Rows that are known when an error or Ctrl-C ends it are printed. The run
    folders are kept where a row has no verdict.
    """
    try:
        folder = working_folder(keep)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_CODES[NOT_SUPPORTED]
    rows: list[VerificationRow] = []
    each_once = list(dict.fromkeys(layouts))
    try:
        with sigterm_as_interrupt():
            for model in dict.fromkeys(models):
                rows.extend(
                    _of_model(replace(asked, model=model), each_once, folder / f"{len(rows)}_{Path(model).name}")
                )
    except KeyboardInterrupt:
        if rows:
            _print(rows, as_json)
        print("interrupted: all launches ended", file=sys.stderr)
        return OTHER_ERROR
    except (TransientFetchError, OSError) as error:
        if rows:
            _print(rows, as_json)
        print(error, file=sys.stderr)
        return OTHER_ERROR
    else:
        _print(rows, as_json)
    finally:
        if any(row.verdict in (NOT_JUDGED, FAILED) for row in rows):
            print(f"run folders: {folder}", file=sys.stderr)  # their logs say why
        elif keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    found = {row.verdict for row in rows}
    return next(
        (EXIT_CODES[word] for word in (DEFECT, FAILED, NOT_JUDGED, NOT_SUPPORTED) if word in found), EXIT_CODES[AGREES]
    )


def _of_model(asked: VerificationSpec, layouts: list[Layout], folder: Path) -> Iterator[VerificationRow]:
    reference = folder / "reference.zip"
    for layout in layouts:
        run = RunPaths(folder / str(layout).replace(" ", "_"))
        run.folder.mkdir(parents=True)
        print(f"{asked.model}, {layout}", file=sys.stderr, flush=True)
        wanted, there = replace(asked, layout=layout), reference.is_file()
        if there:  # it holds what the first layout was asked
            wanted = replace(wanted, prompts=None, num_prompts=None, new_tokens=None, positions=None)
        request = VerificationRequest(wanted, save=None if there else reference, reference=reference if there else None)
        outcome, verification, _ = verified(request, run)
        yield _row(request.asked, outcome, verification)


def _row(asked: VerificationSpec, outcome: VerificationOutcome, verification: Verification | None) -> VerificationRow:
    row = VerificationRow(asked.model, _kind(verification), str(asked.layout), outcome.verdict, outcome.reason)
    if not outcome.judged:
        return row
    judged = outcome.judged[0]
    row = replace(row, not_reached=judged.reach.missed if judged.reach is not None else ())
    verdict = judged.verdict
    if verdict.nearest is not None:
        value = verdict.nearest.statistic.value
        row = replace(
            row,
            worst=verdict.nearest.name,
            worst_times_noise=value if math.isfinite(value) else None,
            limit_times_noise=verdict.nearest.limit,
        )
    if verdict.ladder is not None and verdict.noise is not None:
        own, noise = verdict.ladder.logit_difference, verdict.noise.logit_difference
        return replace(row, difference=own, noise_difference=noise)
    if verdict.encoded is not None and verdict.encoded_noise is not None:
        own, noise = verdict.encoded.state_difference, verdict.encoded_noise.state_difference
        return replace(row, difference=own, noise_difference=noise)
    return row


def _kind(verification: Verification | None) -> str | None:
    if verification is None:
        return None
    [model] = verification.plan.models
    return kind_of(read_model(Path(model.manifest), ModelManifest, PLAN_BYTES))


def _print(rows: list[VerificationRow], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_data(row) for row in rows], indent=1, allow_nan=False))
        return
    table = Table(box=None, pad_edge=False)
    for title in (
        "model",
        "kind",
        "layout",
        "verdict",
        "worst, in units of noise (limit)",
        "largest difference (noise)",
    ):
        table.add_column(title, overflow="fold")
    for row in rows:
        cells = (row.model, row.kind or _UNKNOWN, row.layout, row.verdict, _worst(row), _difference(row))
        table.add_row(*map(Text, cells))
    set_width(Console(), _WIDTH).print(table)
    for row in rows:
        if row.verdict != AGREES:
            print(f"{row.model}, {row.layout}: {row.verdict}: {row.reason}")
    missed: dict[str, list[str]] = {}
    for row in rows:
        if row.not_reached:
            missed.setdefault("; ".join(row.not_reached), []).append(row.model)
    for what, models in missed.items():
        print(f"not reached ({', '.join(dict.fromkeys(models))}): {what}")


def _worst(row: VerificationRow) -> str:
    if row.worst is None or row.limit_times_noise is None:
        return _UNKNOWN
    value = "no number" if row.worst_times_noise is None else significant(row.worst_times_noise, 2)
    return f"{value} ({row.limit_times_noise:.2g}): {row.worst}"


def _difference(row: VerificationRow) -> str:
    if row.difference is None or row.noise_difference is None:
        return _UNKNOWN
    return f"{row.difference:.2e} ({row.noise_difference:.2e})"


def _data(row: VerificationRow) -> dict[str, Any]:
    found = vars(row) | {"reason": row.reason or None}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }
