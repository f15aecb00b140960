"""Admission of a batch: what fits runs at once, waves and preemption compute every token."""

import pytest

from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.engines.kept import kept_tokens
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.schedule import MOST_PHASES, admit, cache_tokens, kept_by_batch


def point(
    engine: str = "vllm", batch: int = 16, tokens: int = 512, model: str = "llama-2-7b", tp: int = 1
) -> BatchPoint:
    device = accelerator("a100-40gb")
    machine = Machine(name=device.name, accelerator=device, accelerators=8)
    return BatchPoint(engine, find_model(model), machine, tp, batch, tokens, tokens)


def decoded(one: BatchPoint) -> float:
    return sum(steps * sequences for steps, sequences, _ in admit(one).phases)


def test_a_batch_that_fits_is_one_phase_at_the_mean_context() -> None:
    found = admit(point())
    assert found.phases == ((512.0, 16.0, 768.0),) and found.prefilled == 16 * 512 and not found.queues


def test_tensorrt_llm_runs_waves_of_whole_sequences() -> None:
    one = point("tensorrt-llm", batch=64, tokens=1024)
    found, at_once = admit(one), int(cache_tokens(one) // 2048)
    assert found.queues and found.prefilled == 64 * 1024 and 8 < at_once < 32
    assert found.phases[0] == (1024.0 * (64 // at_once), float(at_once), 1536.0)
    assert decoded(one) == 64 * 1024


def test_vllm_preempts_and_computes_prompts_again() -> None:
    one = point(batch=64, tokens=1024)
    found = admit(one)
    assert found.queues and len(found.phases) <= MOST_PHASES and found.prefilled > 64 * 1024
    assert decoded(one) == pytest.approx(64 * 1024)
    room = cache_tokens(one)
    assert all(sequences * context <= 1.1 * room for _, sequences, context in found.phases)


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_more_sequences_never_take_less(engine: str) -> None:
    steps = [sum(steps for steps, _, _ in admit(point(engine, batch, 1024)).phases) for batch in (1, 16, 32, 64, 128)]
    assert steps == sorted(steps) and steps[0] == 1024


@pytest.mark.parametrize(
    ("model", "tokens", "kept"),
    [
        ("llama-3-8b", 8192, 8192),
        ("gemma-3-27b", 8192, 10 * (512 + 6 * 65) * 16 / 62),  # 52 layers of 1,024 tokens in 6 groups of 10, and 10
        ("gemma-3-27b", 1000, 10 * 7 * 63 * 16 / 62),  # shorter than the window: whole blocks, and 8 layers of filling
        ("gpt-oss-20b", 8192, 12 * (512 + 9) * 16 / 24),  # 12 layers of 128 tokens and 12 of all
        ("gemma-2-9b", 8192, 21 * (512 + 257) * 16 / 42),
        ("mistral-7b", 32768, 257 * 16),  # all layers slide: one group
    ],
)
def test_vllm_keeps_the_blocks_that_a_window_touches(model: str, tokens: int, kept: float) -> None:
    assert kept_tokens(point(model=model), tokens) == pytest.approx(kept)
    assert kept_tokens(point("rankwise", model=model), tokens) == tokens
    alone = kept_tokens(point("transformers", model=model), tokens)
    assert alone == pytest.approx(find_model(model).cache_elements(tokens) / find_model(model).cache_elements(1))


def test_a_window_leaves_room_for_more_sequences() -> None:
    """Planned with whole contexts, a batch of Gemma 3 queued where vLLM runs it at once."""
    windowed, whole = (point(engine, 32, 8192, "gemma-3-4b") for engine in ("vllm", "sglang"))
    assert cache_tokens(windowed) == cache_tokens(whole) and kept_by_batch(windowed) < 0.35 * kept_by_batch(whole)
    assert not admit(windowed).queues and admit(whole).queues
    assert decoded(windowed) == decoded(whole) == 32 * 8192
    crowded = point("vllm", 256, 8192, "gemma-3-4b")
    assert admit(crowded).queues and decoded(crowded) == pytest.approx(256 * 8192)


def test_weights_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"num_gpus: 138\.0 GB of weights a GPU do not fit in the 42\.4 GB of a100-40gb"
    ):
        admit(point(model="llama-2-70b"))


@pytest.mark.parametrize(("batch", "said"), [(10**12, "expected at most 100,000"), (90_000, "too many to simulate")])
def test_a_batch_that_no_engine_runs_is_refused(batch: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"batch_size: {batch} sequences at once.*{said}"):
        admit(point(batch=batch, tokens=2048))
