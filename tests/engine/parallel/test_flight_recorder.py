"""What is kept of the last operations after a failure; NCCL's recorder, which builds for CPUs lack, is a stand-in."""

import json
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as torch_c10d

from engine.parallel import flight_recorder as flight


def kept(folder: Path) -> dict[str, object]:
    flight.dump(folder / "recorder.json")
    found: dict[str, object] = json.loads((folder / "recorder.json").read_text())["torch"]
    return found


def test_operations_of_nccl_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ProcessGroupNCCL records into a recorder of its own: the general one, that of gloo, was empty on GPUs."""
    entries = {"entries": [{"profiling_name": "nccl:all_reduce", "state": "scheduled"}]}
    monkeypatch.setattr(torch_c10d, "_dump_nccl_trace_json", lambda: json.dumps(entries).encode(), raising=False)
    assert kept(tmp_path)["nccl"] == entries
    assert "version" in kept(tmp_path)


def test_a_build_without_recorders_keeps_its_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_c10d, "_dump_fr_trace_json")
    monkeypatch.delattr(torch_c10d, "_dump_nccl_trace_json", raising=False)
    assert kept(tmp_path) is None
