"""Verdicts of `rankwise deploy`: what is kept of them, and what a damaged file costs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.common.execution import Layout
from flows.cli.deploy.verdicts import judged_by_transformers


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that were verified, each of which agrees."""
    found: list[str] = []

    def verify(request: object, run: object) -> tuple[SimpleNamespace, None, None]:
        found.append("m")
        return SimpleNamespace(verdict="agrees", reason="the same tokens"), None, None

    monkeypatch.setattr("flows.cli.verify.run.verified", verify)
    monkeypatch.setattr("flows.cli.deploy.verdicts.resolved_model", lambda *_: SimpleNamespace(identity="folder:a"))
    return found


@pytest.mark.parametrize(
    "content", ["", '{"verdict": "agr', "[]", "{}", '{"verdict": "agreed", "reason": ""}', "\0" * 40]
)
def test_a_damaged_verdict_is_found_again(tmp_path: Path, verified: list[str], content: str) -> None:
    """It ended each deployment of the model, in a traceback where a field was missing."""
    judge = judged_by_transformers(tmp_path)
    told = ("agrees", "the same tokens")
    assert judge("m", Layout(), "float32") == told and judge("m", Layout(), "float32") == told
    assert len(verified) == 1
    (kept,) = (tmp_path / "verdicts").iterdir()
    kept.write_text(content)
    assert judge("m", Layout(), "float32") == told and len(verified) == 2
    assert json.loads(kept.read_text()) == {"verdict": "agrees", "reason": "the same tokens"}


def test_a_verdict_is_of_the_code_that_gave_it(
    tmp_path: Path, verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older engine was in the bundles of a newer one, which nobody had compared with anything."""
    judged_by_transformers(tmp_path)("m", Layout(), "float32")
    monkeypatch.setattr("flows.cli.deploy.verdicts.code_version", lambda: {"RANKWISE_COMMIT": "another"})
    for times in (2, 2):
        judged_by_transformers(tmp_path)("m", Layout(), "float32")
        assert len(verified) == times
    monkeypatch.setattr("flows.cli.deploy.verdicts.version_of", lambda name: f"{name} 99")
    judged_by_transformers(tmp_path)("m", Layout(), "float32")
    assert len(verified) == 3
