"""Output of `rankwise verify` as text and as JSON."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from configs.common.printable import plural
from configs.workloads.prompted import PromptedWorkload
from reports.correctness.reach import Reach
from reports.correctness.section import JudgedCell, ladder_lines
from tasks.checks.environment import machine_fingerprint
from tasks.checks.verification import Verification
from tasks.checks.verification_inputs import VerificationSpec
from tasks.models.saved_reference import SavedReference

VerificationVerdict = Literal["agrees", "defect", "not judged", "not supported", "failed"]
AGREES: VerificationVerdict = "agrees"
DEFECT: VerificationVerdict = "defect"
NOT_JUDGED: VerificationVerdict = "not judged"
NOT_SUPPORTED: VerificationVerdict = "not supported"
FAILED: VerificationVerdict = "failed"
_FINDINGS = 3
"""Maximum number of printed findings, worst first."""


@dataclass(frozen=True)
class VerificationOutcome:
    """Outcome of a verification. judged: the requested cell, then its check in float32; empty: no verdict.

    measured: a launch ran, so there are logs. log: log of the failed rank.
    """

    verdict: VerificationVerdict
    reason: str
    judged: tuple[JudgedCell, ...] = ()
    measured: bool = False
    log: Path | None = None


def outcome_lines(
    outcome: VerificationOutcome,
    asked: VerificationSpec,
    verification: Verification | None,
    saved: SavedReference | None,
    kept: Path | None,
) -> list[str]:
    """Return a short text: what was compared, the verdict, and the figures with the noise."""
    lines = []
    if verification is not None and outcome.judged:
        lines += [*_compared(verification, saved), ""]
    lines.append(f"{outcome.verdict}: {outcome.reason}" if outcome.reason else outcome.verdict)
    for reach in dict.fromkeys(_reaches(outcome.judged)):
        lines.append(f"compared: {reach.text}")
        lines += [f"not reached: {reach.missed_text}"] if reach.missed else []
    for item in outcome.judged:
        lines += ["", *_figures(item)]
    if verification is not None:
        lines += [f"note: {note}" for note in verification.notes]
    if outcome.log is not None:
        lines.append(f"log: {outcome.log}")
    if kept is not None:
        lines.append(f"run folder: {kept}")
    return lines


def outcome_json(
    outcome: VerificationOutcome,
    code: int,
    asked: VerificationSpec,
    verification: Verification | None,
    saved: SavedReference | None,
    kept: Path | None,
) -> str:
    """Return the outcome as one JSON object; unknown values are null."""
    model = verification.plan.models[0] if verification is not None else None
    work = _workload(verification) if verification is not None else None
    data = {
        "verdict": outcome.verdict,
        "exit_code": code,
        "reason": outcome.reason or None,
        "model": {"written": asked.model, "identity": model.identity if model else None},
        "engine": asked.engine,
        "layout": {axis: getattr(asked.layout, axis) for axis in ("dp", "tp", "pp")},
        "dtype": asked.dtype,
        "prompts": work.num_prompts if work else None,
        "new_tokens": getattr(work, "new_tokens", None),
        "batch_size": work.batch_size if work else None,
        "reference": _reference_json(verification, saved) if verification is not None else None,
        "reached": _reached_json(outcome.judged),
        "not_reached": list(dict.fromkeys(part for reach in _reaches(outcome.judged) for part in reach.missed)),
        "checks": [_check_json(item) for item in outcome.judged],
        "notes": list(verification.notes) if verification is not None else [],
        "log": _text(outcome.log),
        "kept": _text(kept),
    }
    return json.dumps(data, indent=1, allow_nan=False)


def _workload(verification: Verification, reference: bool = False) -> PromptedWorkload:
    key = verification.reference_cell if reference else verification.asked_cell
    workload = verification.plan.cells[key].workload
    assert isinstance(workload, PromptedWorkload)
    return workload


def _compared(verification: Verification, saved: SavedReference | None) -> list[str]:
    work, asked = _workload(verification), verification.asked
    orders = _workload(verification, reference=True).noise_orders
    [model] = verification.plan.models
    versions = saved.about.saved_on if saved is not None else machine_fingerprint()
    by = f"unmodified transformers {versions.get('transformers')} on one rank in float32"
    lines = [
        f"{model.name} ({model.identity})",
        f"{asked.engine}, {asked.layout}, {asked.dtype}, against {by}",
        f"{plural(work.num_prompts or 1, 'prompt')} in batches of {work.batch_size}{_made(work)}; "
        f"noise from {orders} reduction orders",
    ]
    if saved is not None:
        lines.append(f"reference: {saved.path}, saved from {saved.about.model_name} ({saved.about.model})")
    return lines


def _reaches(judged: tuple[JudgedCell, ...]) -> list[Reach]:
    return [item.reach for item in judged if item.reach is not None]


def _reached_json(judged: tuple[JudgedCell, ...]) -> dict[str, Any] | None:
    found = _reaches(judged)
    if not found:
        return None
    return {"positions": found[0].positions, "batch_size": found[0].rows, "decode_steps": found[0].steps}


def _made(work: PromptedWorkload) -> str:
    new_tokens = getattr(work, "new_tokens", None)
    return ", one embedding each" if new_tokens is None else f", {plural(new_tokens, 'new token')} each"


def _figures(item: JudgedCell) -> list[str]:
    """Return the lines of a cell: its verdict, findings above the noise, and the ladder."""
    verdict = item.verdict
    figures = verdict.ladder is not None or verdict.encoded is not None
    lines = [f"{item.label}: {verdict.word} (noise in parentheses)" if figures else _worded(item)]
    lines += [f"  exceeds the noise: {finding}" for finding in verdict.findings[:_FINDINGS]]
    return lines + [f"  {line}" for line in ladder_lines(verdict)]


def _worded(item: JudgedCell) -> str:
    return f"{item.label}: {item.verdict.word}: {item.verdict.reason}"


def _reference_json(verification: Verification, saved: SavedReference | None) -> dict[str, Any]:
    [model] = verification.plan.models
    work = _workload(verification, reference=True)
    return {
        "engine": "transformers",
        "dtype": "float32",
        "model": saved.about.model if saved is not None else model.identity,
        "file": _text(saved.path if saved is not None else None),
        "noise_dtypes": list(work.noise_dtypes),
        "noise_orders": work.noise_orders,
        "environment": saved.about.saved_on if saved is not None else machine_fingerprint(),
    }


def _check_json(item: JudgedCell) -> dict[str, Any]:
    found: dict[str, Any] = _finite(asdict(item.verdict))
    word, reason = found.pop("word"), found.pop("reason")
    return {"label": item.label, "dtype": item.result.cell.dtype, "verdict": word, "reason": reason or None, **found}


def _finite(value: Any) -> Any:
    """Return plain data that JSON can represent: NaN and infinities become null, keys strings."""
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
