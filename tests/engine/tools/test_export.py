"""Exported graphs load elsewhere and say what transformers says; what cannot be exported is refused in one line."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from engine.peers.onnx.tensorrt_plan import build_plans, shape_range
from engine.tools import export as exporting
from engine.tools.export import export, main

RANKWISE = str(Path(sys.executable).with_name("rankwise"))


def manifest(architecture: str = "bert-1m") -> ModelManifest:
    config = ARCHITECTURES[architecture]
    return ModelManifest(identity=f"synthetic:{architecture}@1", source="synthetic", folder="", files={}, config=config)


@pytest.mark.slow
def test_an_exported_decoder_is_checked_against_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    (tmp_path / "m.json").write_text(manifest("llama-1m").model_dump_json())
    command = [str(tmp_path / "m.json"), "--to", "onnx", "--out", str(tmp_path / "out"), "--optimization", "basic"]
    assert main(command) == 0
    said = json.loads((tmp_path / "out" / "export.json").read_text())
    assert said["agrees"] and 0 < said["largest_difference"] < 1e-4
    assert said["optimization"] == "basic" and said["graphs"] == ["decoder.onnx"]
    assert "optimisation level basic" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "out" / "decoder.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    assert names[:4] == ["input_ids", "attention_mask", "position_ids", "columns"] and "past.2.value" in names
    assert main(command) == 2, "a folder with something in it was written over"
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.nightly
def test_graphs_that_say_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = exporting._outputs

    def off(scorer: Any, *given: Any, **named: Any) -> list[Any]:
        found = true(scorer, *given, **named)
        return [each * 1.5 for each in found] if "Onnx" in type(scorer).__name__ else found

    monkeypatch.setattr(exporting, "_outputs", off)
    with pytest.raises(NotImplementedError, match="differ by"):
        export(manifest(), "onnx", tmp_path / "out", "float32", "all")
    assert not (tmp_path / "out" / "export.json").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--to", "tensorrt"], "tensorrt is not installed; it needs an NVIDIA GPU"),
        (["--to", "onnx", "--dtype", "bfloat16"], "float32"),
    ],
)
def test_the_command_refuses_with_a_reason(tmp_path: Path, options: list[str], reason: str) -> None:
    command = [RANKWISE, "export", "synthetic:bert-1m@1", "--out", str(tmp_path / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={"RANKWISE_CACHE": str(tmp_path), "PATH": ""})
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


class _Network:
    def __init__(self, flags: int) -> None:
        self.num_inputs = 1

    def get_input(self, place: int) -> Any:
        return types.SimpleNamespace(name="input_ids", shape=(-1, -1))


class _Builder:
    """TensorRT's, as far as a plan needs it; the one thing here that no machine without its GPU has."""

    plan: bytes | None = b"plan"

    def __init__(self, logger: Any) -> None:
        self.shapes: dict[str, Any] = {}

    def create_network(self, flags: int) -> _Network:
        return _Network(flags)

    def create_builder_config(self) -> Any:
        return types.SimpleNamespace(set_flag=lambda flag: None, add_optimization_profile=lambda profile: None)

    def create_optimization_profile(self) -> Any:
        return types.SimpleNamespace(set_shape=lambda name, *sizes: self.shapes.update({name: sizes}))

    def build_serialized_network(self, network: _Network, settings: Any) -> bytes | None:
        assert self.shapes == {"input_ids": ((1, 1), (1, 128), (16, 2048))}
        return self.plan


def test_plans_lie_beside_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parser:
        num_errors = 1

        def __init__(self, network: Any, logger: Any) -> None:
            pass

        def parse_from_file(self, path: str) -> bool:
            return Path(path).read_bytes() == b"graph"

        def get_error(self, place: int) -> str:
            return "no such operator"

    class Logger:
        WARNING = 1

        def __init__(self, level: int) -> None:
            pass

    flags = types.SimpleNamespace()
    stub = types.SimpleNamespace(Logger=Logger, Builder=_Builder, OnnxParser=Parser, BuilderFlag=flags)
    monkeypatch.setitem(sys.modules, "tensorrt", stub)  # type: ignore[arg-type]
    (tmp_path / "encoder.onnx").write_bytes(b"graph")
    (tmp_path / "broken.onnx").write_bytes(b"")
    (plan,) = build_plans([tmp_path / "encoder.onnx"], "float16")
    assert plan == tmp_path / "encoder.plan" and plan.read_bytes() == b"plan"
    with pytest.raises(NotImplementedError, match="no such operator"):
        build_plans([tmp_path / "broken.onnx"], "float32")
    monkeypatch.setattr(_Builder, "plan", None)
    with pytest.raises(NotImplementedError, match="built no plan"):
        build_plans([tmp_path / "encoder.onnx"], "float32")


def test_only_a_past_may_hold_nothing() -> None:
    assert shape_range("past.0.key", (-1, 4, -1, 16)) == ((1, 4, 0, 16), (1, 4, 128, 16), (16, 4, 2047, 16))
    assert shape_range("columns", (-1,)) == ((1,), (128,), (2048,))
