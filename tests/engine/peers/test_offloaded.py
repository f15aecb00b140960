"""The reference in less memory than it needs: the same answers, a peak near the limit, a reason where it cannot."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.workloads.generate import GenerateWorkload
from engine.peers import offloaded
from engine.peers.offloaded import place
from engine.peers.reference import load_reference
from engine.planner.memory.reference import reference_memory
from engine.prompts.tokens import batches_of_tokens
from tests.support.answers.peer_runs import context_of, made, outcome_of

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MIB = 2**20
SIZES: dict[str, Any] = {"intermediate_size": 96, "max_position_embeddings": 128, "num_hidden_layers": 4}


@pytest.mark.slow
def test_the_answers_and_the_noise_are_the_same_when_layers_are_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = made("llama", tmp_path / "model", **SIZES)
    work = GenerateWorkload(
        num_prompts=4, batch_size=1, prompt_tokens=9, new_tokens=4, answers=True, noise_dtypes=("float32", "bfloat16")
    )
    whole = outcome_of(tmp_path, manifest, work)
    assert whole.figures["reference_placement"] == "in memory"
    # All but some tens of kilobytes is taken by the work itself.
    need = reference_memory(0, 96, 64, 4, 13, True)
    monkeypatch.setattr(
        offloaded, "available_bytes", lambda device: int((need.working + 200_000) / offloaded.USED_SHARE)
    )
    parts = outcome_of(tmp_path, manifest, work)
    assert "read from disk" in str(parts.figures["reference_placement"])
    assert parts.figures["model_parameters"] == whole.figures["model_parameters"]
    assert np.array_equal(parts.samples["answer_tokens"], whole.samples["answer_tokens"])
    for name in ("answer_logits", "answer_nll", "noise_float32_nll", "noise_bfloat16_nll", "noise_bfloat16_rms"):
        assert np.array_equal(parts.samples[name], whole.samples[name]), name
    assert not list(tmp_path.rglob("offloaded*")), "nothing is copied"


@pytest.mark.slow
def test_experts_that_are_written_in_another_form_stay_apart_by_precision_and_out_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    manifest = made("qwen3_moe", tmp_path / "model", **SIZES, **experts, num_key_value_heads=2)
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    work = GenerateWorkload(
        num_prompts=3, batch_size=1, prompt_tokens=9, new_tokens=4, answers=True, noise_dtypes=("bfloat16", "float32")
    )
    whole = outcome_of(tmp_path, manifest, work)
    need = reference_memory(0, 96, 64, 4, 13, True)
    monkeypatch.setattr(
        offloaded, "available_bytes", lambda device: int((need.working + 900_000) / offloaded.USED_SHARE)
    )
    parts = outcome_of(tmp_path, manifest, work)
    assert "read from disk" in str(parts.figures["reference_placement"])
    for name in ("answer_logits", "noise_bfloat16_rms", "noise_float32_nll", "noise_float32_rms"):
        assert np.array_equal(parts.samples[name], whole.samples[name]), name
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before
    assert not list(tmp_path.rglob("offloaded*")), "what was written is left"


def test_what_was_written_for_a_reference_that_fails_is_removed_with_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = made("llama", tmp_path / "model", **SIZES)
    work = GenerateWorkload(
        num_prompts=1, batch_size=1, prompt_tokens=9, new_tokens=4, answers=True, noise_dtypes=("float32",)
    )
    need = reference_memory(0, 96, 64, 4, 13, False)
    monkeypatch.setattr(
        offloaded, "available_bytes", lambda device: int((need.working + 200_000) / offloaded.USED_SHARE)
    )
    measurement, context = context_of(tmp_path, manifest, work)
    with context.closing:
        load_reference(measurement, context)
        assert len(list((tmp_path / "job").glob("offloaded_*"))) == 1
    assert not list(tmp_path.rglob("offloaded*"))


def test_what_does_not_fit_layer_by_layer_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("llama", tmp_path / "model", **SIZES)
    monkeypatch.setattr(offloaded, "available_bytes", lambda device: 100 * MIB)
    with pytest.raises(MemoryError, match=r"reference: .* GiB needed .* 0\.1 GiB available on cpu.*save the reference"):
        place(tmp_path / "model", [tmp_path / "model" / "model.safetensors"], CPU, 2048, twin=True)


PEAK = r"""
import re, sys, torch
from pathlib import Path
from engine.peers import offloaded
from engine.planner.memory.reference import reference_memory
torch.set_num_threads(1)

def peak():  # of this program alone: ru_maxrss begins with that of the process that started it
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    offloaded.available_bytes = lambda device: int((reference_memory(0, 500, 512, 12, 8, False).working + limit) / 0.8)
else:
    offloaded.available_bytes = lambda device: 10**12
placement = offloaded.place(folder, sorted(folder.glob("*.safetensors")), torch.device("cpu"), 8, twin=False)
assert placement.offloaded == bool(limit)
import transformers.models.llama.modeling_llama, accelerate
before = peak()
with torch.inference_mode():
    model = placement.load(folder, "generate", torch.float32)
    logits = model(input_ids=torch.arange(8)[None]).logits
print(peak() - before, logits.double().sum().item())
"""


@pytest.mark.nightly
def test_the_peak_stays_near_the_limit(tmp_path: Path) -> None:
    sizes = {"vocab_size": 500, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    manifest = made("llama", tmp_path / "model", **sizes)
    weights = sum(path.stat().st_size for path in Path(manifest.folder).glob("*.safetensors"))
    found = []
    for limit in (0, 60 * MIB):
        command = [sys.executable, "-c", PEAK, manifest.folder, str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[3])
        assert done.returncode == 0, done.stderr
        peak, total = done.stdout.split()
        found.append((int(peak), float(total)))
    assert found[0][1] == found[1][1]
    assert found[0][0] > 0.9 * weights > 170 * MIB and found[1][0] < 0.6 * weights, (found, weights)


def test_the_need_is_that_of_weights_twin_and_logits() -> None:
    small, large = (reference_memory(1000, 100, 8, 2, positions, twin=False) for positions in (1, 1001))
    assert small.weights == 4000 and small.twin == 0 and reference_memory(1000, 1, 1, 1, 1, twin=True).twin == 2000
    assert large.working - small.working == 1000 * (3 * 4 * 100 + 2 * 4 * 2 * 8 + 16 * 4 * 8)
    assert large.total == large.weights + large.working


def test_batches_hold_so_many_tokens_with_their_padding() -> None:
    prompts = [[1] * length for length in (3, 4, 2, 30, 2, 2)]
    assert [tuple(batch.tokens.shape) for batch in batches_of_tokens(prompts, 12, CPU)] == [(3, 4), (1, 30), (2, 2)]


def test_a_gpu_keeps_what_fits_and_the_host_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("llama", tmp_path / "model", **SIZES)
    need = reference_memory(0, 96, 64, 4, 16, False)
    monkeypatch.setattr(
        offloaded, "available_bytes", lambda device: int((need.working + 100_000) / offloaded.USED_SHARE)
    )
    monkeypatch.setattr(offloaded, "host_memory_available", lambda: 1000 * MIB)
    device: Any = SimpleNamespace(type="cuda", index=1)
    placement = place(tmp_path / "model", [tmp_path / "model" / "model.safetensors"], device, 16, twin=False)
    assert placement.budget is not None and list(placement.budget) == [1, "cpu"]
    assert placement.budget[1] < 100_000 and placement.budget["cpu"] == int(offloaded.USED_SHARE * 1000 * MIB)
