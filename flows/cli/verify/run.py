"""Implementation of `rankwise verify`, from the request to the exit code; see `flows.cli.verify.command`."""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from configs.common.printable import plural
from configs.common.system.cores import usable_cores
from configs.plans.paths import RunPaths
from configs.records.record import Record, Status
from configs.targets.target import LocalTarget
from engine.planner.accelerators import device_text
from engine.planner.local import local_devices
from flows.cli.signals import sigterm_as_interrupt
from flows.cli.verify.text import (
    AGREES,
    DEFECT,
    FAILED,
    NOT_JUDGED,
    NOT_SUPPORTED,
    VerificationOutcome,
    outcome_json,
    outcome_lines,
)
from flows.folders import cache_folder
from reports.correctness.section import judge_experiment
from reports.reading.load import load_run
from tasks.checks.environment import machine_fingerprint
from tasks.checks.verification import Verification, prepare_verification, run_verification
from tasks.checks.verification_inputs import VerificationSpec
from tasks.models.saved_reference import SavedReference, read_saved_reference, save_reference
from tasks.models.sources import TransientFetchError

OTHER_ERROR = 1
EXIT_CODES = {AGREES: 0, DEFECT: 4, NOT_SUPPORTED: 2, NOT_JUDGED: 3, FAILED: 3}
_USER_MISTAKES = ("ValueError", "NotImplementedError", "ModuleNotFoundError")


@dataclass(frozen=True)
class VerificationRequest:
    """Arguments of the command line."""

    asked: VerificationSpec
    save: Path | None = None
    reference: Path | None = None
    as_json: bool = False
    keep: Path | None = None


def run_verify(request: VerificationRequest) -> int:
    """Verify, print, and return the exit code."""
    try:
        folder = _run_folder(request)
    except ValueError as error:
        return _say(request, VerificationOutcome(NOT_SUPPORTED, str(error)))
    kept = False
    try:
        with sigterm_as_interrupt():
            outcome, verification, saved = verified(request, RunPaths(folder))
        kept = outcome.verdict in (NOT_JUDGED, FAILED) or (request.keep is not None and outcome.measured)
        return _say(request, outcome, verification, saved, folder if kept else None)
    except KeyboardInterrupt:
        kept = request.keep is not None
        print("interrupted: all launches ended", file=sys.stderr)
        return OTHER_ERROR
    except TransientFetchError as error:
        print(error, file=sys.stderr)
        return OTHER_ERROR
    except OSError as error:
        kept = request.keep is not None
        print(f"{error.filename or folder}: {error.strerror or error}", file=sys.stderr)
        return OTHER_ERROR
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _run_folder(request: VerificationRequest) -> Path:
    """Return an empty working folder. Raises ValueError for unusable paths."""
    if request.save is not None and request.reference is not None:
        raise ValueError("--save-reference, --reference: mutually exclusive")
    if request.save is not None and (request.save.is_dir() or not request.save.absolute().parent.is_dir()):
        raise ValueError(f"--save-reference: got {request.save}, expected a file in an existing folder")
    if request.save is not None:
        _check_writable(request.save.absolute().parent)
    return working_folder(request.keep)


def _check_writable(folder: Path) -> None:
    """Raise ValueError for a folder that takes no files: the reference is written when all is measured."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--save-reference: {folder}: {error.strerror or error}") from error


def working_folder(keep: Path | None) -> Path:
    """Return the empty folder that the user named, or a temporary one. Raises ValueError for an unusable one."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="rankwise-verify-"))
    try:
        keep.mkdir(exist_ok=True)
        if any(keep.iterdir()):
            raise ValueError(f"--keep: {keep} is not empty. Use a new folder")
    except OSError as error:
        raise ValueError(f"--keep: {keep}: {error.strerror or error}") from error
    return keep.absolute()


def verified(
    request: VerificationRequest, run: RunPaths
) -> tuple[VerificationOutcome, Verification | None, SavedReference | None]:
    """Prepare, measure and judge in an empty run folder."""
    cache, asked = cache_folder(), request.asked
    try:
        saved = read_saved_reference(request.reference) if request.reference is not None else None
        verification = prepare_verification(asked, run, cache, Path.cwd(), saved)
    except ValueError as error:
        # The study is ours: its user named a model, and no place in a list.
        return VerificationOutcome(NOT_SUPPORTED, str(error).replace("models[0].id: ", "")), None, None
    devices, cores = local_devices(LocalTarget()), usable_cores()
    if devices and asked.layout.ranks > len(devices):
        reason = (
            f"--layout: {asked.layout.ranks} ranks, but this machine has {device_text(devices)}, one for each rank. "
            "With CUDA_VISIBLE_DEVICES= (empty) the ranks compute on its cores"
        )
        return VerificationOutcome(NOT_SUPPORTED, reason), None, None
    if not devices and asked.layout.ranks > cores:
        print(f"warning: {asked.layout.ranks} ranks on {plural(cores, 'core')} will be slow", file=sys.stderr)
    run_verification(
        verification, cache, lambda line: print(line, file=sys.stderr, flush=True), request.save is not None
    )
    record = verification.record(verification.reference_cell)
    if request.save is not None and record is not None and record.status is Status.COMPLETED:
        save_reference(request.save, run, verification.plan, machine_fingerprint())
    return _judged(verification), verification, saved


def _judged(verification: Verification) -> VerificationOutcome:
    """Return the verdict of the requested cell and of its check in float32."""
    cells = [(verification.asked_cell, ""), (verification.reference_cell, "the reference: ")]
    # A cell that has no record was left out because of the one that failed.
    for key, whose in sorted(cells, key=lambda cell: verification.record(cell[0]) is None):
        outcome = _not_completed(verification, verification.record(key), whose)
        if outcome is not None:
            return outcome
    study = load_run(verification.run)
    _, judged = judge_experiment(study, verification.experiment)
    judged.sort(key=lambda item: item.result.key != verification.asked_cell)
    words = [item.verdict.word for item in judged]
    decisive = judged[words.index("defect")] if "defect" in words else judged[0]
    verdicts = {"agrees": AGREES, "defect": DEFECT, "not judged": NOT_JUDGED}
    return VerificationOutcome(verdicts[decisive.verdict.word], decisive.verdict.reason, tuple(judged), measured=True)


def _not_completed(verification: Verification, record: Record | None, whose: str) -> VerificationOutcome | None:
    """Return why a verdict is impossible; None if the cell has answers."""
    if record is not None and record.status is Status.COMPLETED:
        return None
    failure = record.failure if record is not None else None
    status = record.status.replace("_", " ") if record is not None else "never begun"
    reason = f"{whose}{failure.message if failure else status}"
    mistake = failure is not None and failure.kind in _USER_MISTAKES
    if record is not None and (record.status is Status.UNSUPPORTED or mistake):
        return VerificationOutcome(NOT_SUPPORTED, reason, measured=True)
    log = verification.run.folder / failure.log if failure and failure.log else None
    return VerificationOutcome(FAILED, f"{reason} ({status})", measured=True, log=log)


def _say(
    request: VerificationRequest,
    outcome: VerificationOutcome,
    verification: Verification | None = None,
    saved: SavedReference | None = None,
    kept: Path | None = None,
) -> int:
    """Print the outcome and return its exit code."""
    code = EXIT_CODES[outcome.verdict]
    if request.as_json:
        print(outcome_json(outcome, code, request.asked, verification, saved, kept))
        return code
    for line in outcome_lines(outcome, request.asked, verification, saved, kept):
        print(line, file=sys.stdout if outcome.judged else sys.stderr)
    return code
