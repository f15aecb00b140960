"""Recorded decode steps give the bits of ordinary ones, or are not used."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.records.record import MeasuringPass
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.inference import recorded
from engine.inference.model import Shard
from engine.inference.paged import PagedSizes
from engine.inference.recorded import RecordedStep, ScaledStep, decode_step, paged_step, path_of, scaled_counts
from engine.kernels import linear, operators, program, rows
from engine.kernels.attention import DecodeAttention
from engine.worker import load_workload
from tests.support.answers.prompted_runs import made_context, made_measurement
from tests.support.answers.recorded_runs import WORDS, Decoding, decode, heard, lose, serve_in_company, shards_of
from tests.support.rank_pool import RankPool

_OTHER_BITS = {"the recorded step gives other bits than the ordinary one"}
# Wide weights: a random model that always says the same would hide mistakes.
_WILD = {"vocab_size": WORDS, "initializer_range": 0.3, "init_std": 0.3}
_NAMES = ["llama-1m", "mistral-1m", "qwen2-1m", "qwen3-1m", "gpt2-1m", "opt-1m", "gpt-neox-1m", "gemma-1m", "phi3-1m"]
_DECODERS = list(_NAMES)
_NAMES += ["t5-1m", "t5-gated-1m"]


def config_of(name: str) -> dict[str, Any]:
    """A family's smallest model; where it has a window, one that is crossed."""
    config = ARCHITECTURES[name] | _WILD
    return config | {"sliding_window": 9} if config.get("sliding_window") else config


@pytest.fixture(autouse=True)
def _inference_mode(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def assert_the_same(answers: list[dict[str, Any]], dtype: str = "float32") -> None:
    """Same tokens and bits; recorded, unless the products of this type are oneDNN's here (AMX, an old compiler)."""
    expected = "recorded" if dtype == "float32" or linear._own_path(getattr(torch, dtype)) else "steps"
    for answer in answers:
        for ordinary, repeated in answer["tokens"]:
            assert ordinary == repeated
        assert answer["same_bits"] == [True] * 3
        assert answer["paths"] == [["steps", expected]] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", _NAMES)
def test_every_family_on_one_rank(name: str, rows: int, dtype: str) -> None:
    answer = decode(0, Decoding(config_of(name), rows, dtype=dtype))
    assert_the_same([answer], dtype)
    # Each prompt has states of its own. Tokens may be the same for all, as a random model's are on some processors.
    assert len(set(answer["sums"])) == 3


@pytest.mark.parametrize("name", _NAMES)
def test_rows_that_are_filled_at_the_left(name: str) -> None:
    assert_the_same([decode(0, Decoding(config_of(name), 4, padding=(0, 3, 1, 5)))])


def test_micro_batches_of_different_sizes() -> None:
    assert_the_same([decode(0, Decoding(config_of("llama-1m"), 5, size=3))])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", ["llama-1m", "qwen3-1m", "gpt2-1m", "gpt-neox-1m", "t5-1m"])
def test_two_ranks(pool: RankPool, name: str, layout: tuple[int, int], dtype: str) -> None:
    run = Decoding(config_of(name), 5, *layout, size=3, dtype=dtype, padding=(0, 1, 0, 0, 2))
    assert_the_same(pool.run(decode, run), dtype)


def assert_served_alike(answers: list[dict[str, Any]], trusted: dict[bool, bool], dtype: str = "float32") -> None:
    """Same logits and caches; recorded, unless the products of this type are oneDNN's here (AMX, an old compiler)."""
    is_recorded = dtype == "float32" or bool(linear._own_path(getattr(torch, dtype)))
    for answer in answers:
        assert answer["same_logits"][1] and answer["same_cache"]
        assert len(answer["counts"]) > 8 and min(answer["counts"]) == 1
        assert answer["trusted"] == {splits: fine and is_recorded for splits, fine in trusted.items()}
        assert not (is_recorded and answer["refusals"])
    assert max(answer["same_logits"][0] for answer in answers) > 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _DECODERS)
def test_steps_of_any_number_of_tokens(name: str, dtype: str) -> None:
    assert_served_alike([serve_in_company(0, Decoding(config_of(name), dtype=dtype))], {False: True}, dtype)


def test_steps_of_any_number_of_tokens_with_two_threads() -> None:
    torch.set_num_threads(2)
    assert_served_alike([serve_in_company(0, Decoding(config_of("llama-1m")))], {False: True})


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", ["llama-1m", "qwen3-1m", "gpt2-1m"])
def test_steps_of_any_number_of_tokens_on_two_ranks(pool: RankPool, name: str, layout: tuple[int, int]) -> None:
    assert_served_alike(pool.run(serve_in_company, Decoding(config_of(name), 1, *layout)), {False: True})


@pytest.mark.parametrize("first", [12, 32])
@pytest.mark.parametrize("name", ["llama-1m", "opt-1m"])
def test_steps_whose_rows_are_split_among_ranks(pool: RankPool, name: str, first: int) -> None:
    """first: number of tokens from which they are; the last one is also the largest of a step."""
    answers = pool.run(serve_in_company, Decoding(config_of(name), tp=2), first)
    assert_served_alike(answers, {False: True, True: True})


def prompt_steps(shard: Shard, counts: tuple[int, ...]) -> tuple[list[Tensor], ScaledStep]:
    """Hidden states of steps of so many tokens of one prompt after another, and what recorded them."""
    cache = shard.new_paged_cache(PagedSizes(blocks=4, block=16, sequences=1, max_length=64, max_tokens=24))
    cache.assign(torch.zeros(4).int(), torch.arange(4).int(), torch.arange(4).int())
    found = []
    for count in counts:
        places = torch.arange(count, dtype=torch.int32)
        words = (places.long() * 7 % WORDS)[None]
        found.append(paged_step(shard, cache, words, torch.zeros_like(places), places).clone())
    assert cache.scaled_recordings is not None
    return found, cache.scaled_recordings[False]


_PROVING = (24, 1, 24, 12)


def test_a_step_of_any_number_is_trusted_after_two_recordings_and_two_comparisons() -> None:
    for end in range(1, 6):
        _, step = prompt_steps(shard_of(), (*_PROVING, 5)[:end])
        assert step.is_trusted is (end >= 4) and not step.refusals
    _, step = prompt_steps(
        shard_of(), (24, 24, 24, 24)
    )  # no other number than the most: nothing is recorded for others
    assert not step.is_trusted


def test_work_that_no_recording_sees_keeps_steps_of_any_number_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, counts = shard_of(), (*_PROVING, 7, 24)
    ordinary = shard.weights.layers[0].down

    def down(x: Tensor) -> Tensor:
        made: Tensor = ordinary(x)
        if made.shape[1] == 12:
            made.numpy()[..., 3] = 0.5
        return made

    monkeypatch.setattr(shard.weights.layers[0], "down", down)
    found, step = prompt_steps(shard, counts)
    assert step.refusals == _OTHER_BITS and not step.is_trusted
    for hidden, count in zip(found, counts, strict=True):
        assert torch.equal(hidden, prompt_steps(shard, (count,))[0][0])


def test_a_function_that_depends_on_the_number_keeps_steps_of_any_number_ordinary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = shard_of()
    ordinary = shard.weights.layers[0].down
    monkeypatch.setattr(
        shard.weights.layers[0], "down", lambda x: ordinary(x if x.shape[1] == 1 else rows.add(x, torch.empty_like(x)))
    )
    _, step = prompt_steps(shard, (*_PROVING, 7))
    assert not step.is_trusted and "other functions" in "".join(step.refusals)


def test_an_operator_of_torch_keeps_steps_of_any_number_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of()
    ordinary = shard.weights.layers[0].down
    monkeypatch.setattr(shard.weights.layers[0], "down", lambda x: ordinary(-x))
    _, step = prompt_steps(shard, (*_PROVING, 7))
    assert step.refusals == {"aten::neg"} and not step.is_trusted


def test_a_token_outside_the_vocabulary_is_an_error_in_a_step_of_any_number_too() -> None:
    shard = shard_of()
    cache = shard.new_paged_cache(PagedSizes(blocks=4, block=16, sequences=1, max_length=64, max_tokens=24))
    cache.assign(torch.zeros(4).int(), torch.arange(4).int(), torch.arange(4).int())
    for count in _PROVING:
        places = torch.arange(count, dtype=torch.int32)
        paged_step(shard, cache, torch.zeros((1, count), dtype=torch.int64), torch.zeros_like(places), places)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        paged_step(shard, cache, torch.tensor([[1, WORDS]]), torch.zeros(2).int(), torch.arange(2).int())


def test_which_numbers_of_tokens_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of()
    cache = shard.new_paged_cache(PagedSizes(blocks=4, block=16, sequences=1, max_length=64, max_tokens=24))
    assert scaled_counts(shard, cache) == {False: list(range(1, 25))}
    torch.set_num_threads(2)
    config = shard.config
    monkeypatch.setattr(recorded, "ONE_THREAD_ELEMENTS", 9 * 2 * config.feed_forward)
    assert config.gated and scaled_counts(shard, cache) == {False: list(range(1, 10))}
    torch.set_num_threads(1)
    monkeypatch.setattr(recorded, "_LARGEST_LAYER", 100)
    assert scaled_counts(shard, cache) == {}


@pytest.mark.slow
def test_a_rank_that_ends_is_missed_in_a_recorded_step() -> None:
    with RankPool(2) as pool:
        for pipe in pool._pipes:
            pipe.send((lose, (Decoding(config_of("llama-1m"), tp=2), 8)))
        assert pool._pipes[0].poll(120)
        fine, answer = pool._pipes[0].recv()
    assert fine, answer
    path, missed, text = answer
    assert (path, missed) == ("recorded", 1) and "recorded operations" in text


def shard_of(name: str = "llama-1m") -> Shard:
    return shards_of(0, Decoding(config_of(name)))["decoder"]


def steps_of(shard: Shard, count: int, by_ordinary_steps: bool = False) -> tuple[list[list[int]], RecordedStep | None]:
    """Greedy tokens of so many steps of two sequences, and the step that made them."""
    cache = shard.new_cache(2, 4 + count)
    shard.forward(torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]]), cache)
    chosen, tokens = torch.tensor([5, 5]), []
    for _ in range(count):
        if by_ordinary_steps:
            chosen = shard.greedy(shard.head(shard.forward(chosen[:, None], cache, last_only=True))[:, -1])
        else:
            chosen = decode_step(shard, cache, chosen[:, None], None).clone()
        tokens.append(chosen.tolist())
    return tokens, cache.recordings.get(2)


def test_trust_comes_after_a_step_a_recording_and_two_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, trusted, compared = shard_of(), [], []
    monkeypatch.setattr(recorded, "_same_bits", lambda one, other: compared.append(1) or torch.equal(one, other))
    cache = shard.new_cache(1, 10)
    for _ in range(6):
        decode_step(shard, cache, torch.tensor([[3]]), None)
        trusted.append(path_of(cache))
    assert trusted == ["steps", "steps", "steps", "recorded", "recorded", "recorded"]
    assert len(compared) == 2 * 2 and cache.length == 6


def test_an_operator_of_torch_in_the_step_keeps_it_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of()
    ordinary = shard.greedy
    monkeypatch.setattr(shard, "greedy", lambda logits: ordinary(-logits))
    tokens, step = steps_of(shard, 8)
    assert step is not None and step.refusals == {"aten::neg"} and not step.is_trusted
    assert tokens == steps_of(shard, 8, by_ordinary_steps=True)[0]


def test_work_that_no_recording_sees_keeps_the_step_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of()
    monkeypatch.setattr(shard, "greedy", lambda logits: torch.from_numpy(logits.numpy().argmin(-1)))
    tokens, step = steps_of(shard, 8)
    assert step is not None and step.refusals == _OTHER_BITS and not step.is_trusted
    assert tokens == steps_of(shard, 8, by_ordinary_steps=True)[0]


def test_keys_that_no_recording_writes_keep_the_step_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of()
    cache, place = shard.new_cache(1, 12), len(shard.layers) - 1
    ordinary = DecodeAttention.run

    def run(self: Any, layer: int, heads: int, values: int, window: int = 0) -> Tensor:
        mixed = ordinary(self, layer, heads, values, window)
        if layer == place:  # which nothing of this step reads
            cache.store.numpy()[0, layer, 0, 0, cache.length, 0] += 1
        return mixed

    monkeypatch.setattr(DecodeAttention, "run", run)
    for _ in range(8):
        decode_step(shard, cache, torch.tensor([[3]]), None)
    assert cache.recordings[1].refusals == _OTHER_BITS


def test_a_number_that_changes_from_step_to_step_keeps_it_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of()
    cache = shard.new_cache(1, 12)
    ordinary = DecodeAttention.run

    def run(self: Any, layer: int, heads: int, values: int, window: int = 0) -> Tensor:
        return ordinary(self, layer, heads, values, cache.length // 2 + 1)

    monkeypatch.setattr(DecodeAttention, "run", run)
    for _ in range(8):
        decode_step(shard, cache, torch.tensor([[3]]), None)
    assert cache.recordings[1].refusals == _OTHER_BITS


def test_weights_that_are_only_lent_are_not_recorded() -> None:
    shard = shard_of()
    shard.weights.memory_mapped = True
    _, step = steps_of(shard, 8)
    assert step is not None and not step.is_trusted
    shard.weights.memory_mapped = False
    _, step = steps_of(shard, 8)
    assert step is not None and step.is_trusted


def test_without_compiled_kernels_steps_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels, _ = steps_of(shard_of(), 8)
    modules = (linear, operators, program, rows)
    try:
        monkeypatch.setenv("RANKWISE_KERNELS", "off")
        for module in modules:
            module._library.cache_clear()
        tokens, step = steps_of(shard_of(), 8)
    finally:
        for module in modules:
            module._library.cache_clear()
    assert step is not None and not step.is_trusted and "no compiler for program.c" in step.refusals
    assert tokens == with_kernels


def test_who_listens_to_the_group_hears_of_every_sum(pool: RankPool) -> None:
    config = config_of("llama-1m")
    # Of the embedding, two of each layer, and the words that both found.
    expected = 1 + 2 * config["num_hidden_layers"] + 1
    assert pool.run(heard, Decoding(config, tp=2)) == [(expected, 0)] * 2


def test_a_token_outside_the_vocabulary_is_an_error_in_a_recorded_step_too() -> None:
    shard = shard_of()
    cache = shard.new_cache(1, 12)
    for _ in range(6):
        decode_step(shard, cache, torch.tensor([[3]]), None)
    assert path_of(cache) == "recorded"
    with pytest.raises(IndexError, match="outside the vocabulary"):
        decode_step(shard, cache, torch.tensor([[WORDS]]), None)


@pytest.mark.parametrize(
    ("measuring_pass", "path"), [("timed", "recorded"), ("memory", "recorded"), ("profile", "steps")]
)
@pytest.mark.parametrize("name", ["llama-1m", "t5-1m"])
def test_a_measurement_says_how_its_steps_were_made(
    tmp_path: Path, name: str, measuring_pass: MeasuringPass, path: str
) -> None:
    manifest = ModelManifest(
        identity=f"synthetic:{name}@1", source="synthetic", folder="", files={}, config=ARCHITECTURES[name]
    )
    kind = GenerateWorkload if name == "llama-1m" else Seq2SeqWorkload
    workload = kind(num_prompts=2, prompt_tokens=5, batch_size=2, new_tokens=8)
    measurement, job = made_measurement(tmp_path, workload, measuring_pass)
    outcome = load_workload(measurement.cell)(measurement, made_context(tmp_path, manifest, job))
    assert outcome.figures["decode_path"] == path
