"""Correctness verdicts of layouts against unmodified transformers.

They are kept for each model, layout and precision, and for the code and the libraries that gave the answers.
"""

import json
import tempfile
import threading
from pathlib import Path

from configs.common.base import content_hash, write_atomically
from configs.common.execution import Dtype, Layout
from configs.common.files.reading import read_json_object
from configs.common.system.versions import version_of
from configs.plans.paths import RunPaths
from slurm.staging.version import code_version
from tasks.checks.verification_inputs import VerificationSpec
from tasks.deployment.bundles import Judge, resolved_model

_NEW_TOKENS, _POSITIONS = 16, 256
_KEPT = ("agrees", "defect")
_LIBRARIES = ("torch", "transformers")
_turn = threading.Lock()
"""Several targets of one command verify a model once."""


def judged_by_transformers(data: Path) -> Judge:
    """Return a judge that verifies on this machine once and remembers what it found."""

    computed_by = code_version() | {name: version_of(name) for name in _LIBRARIES}

    def judge(model: str, layout: Layout, dtype: Dtype) -> tuple[str, str]:
        from flows.cli.verify.run import VerificationRequest, verified
        from flows.folders import cache_folder

        identity = resolved_model(model, cache_folder(), Path.cwd()).identity
        what = {"identity": identity, "layout": layout.model_dump(), "dtype": dtype, "computed_by": computed_by}
        key = content_hash(what)
        path = data / "verdicts" / f"{key}.json"
        with _turn:
            if (known := _known(path)) is not None:
                return known
            spec = VerificationSpec(
                model=model, layout=layout, dtype=dtype, new_tokens=_NEW_TOKENS, positions=_POSITIONS
            )
            with tempfile.TemporaryDirectory(prefix="rankwise-verify-") as folder:
                outcome, _, _ = verified(VerificationRequest(asked=spec), RunPaths(Path(folder)))
            if outcome.verdict in _KEPT:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps({"verdict": outcome.verdict, "reason": outcome.reason}))
            return outcome.verdict, outcome.reason

    return judge


def _known(path: Path) -> tuple[str, str] | None:
    """The verdict and its reason that a file keeps; None without one that can be read: it is found again."""
    try:
        kept = read_json_object(path)
        verdict, reason = kept["verdict"], kept["reason"]
    except (OSError, ValueError, KeyError):
        return None
    return (verdict, str(reason)) if verdict in _KEPT else None
