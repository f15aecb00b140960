"""The generate workload, whole: a real tiny model with a real tokenizer, one rank and two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import MeasuringPass
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from engine.context import Context, RankResult
from engine.correctness import answers
from engine.inference.model import Shard
from engine.inference.pipeline import Replica
from engine.models.sharding import even_share
from engine.models.weights import build_model
from engine.prompts.decoded import Decoded
from engine.prompts.tokens import PromptBatch, batches, prompts_of_rank
from engine.workloads import generate, other_engines
from tests.support.cluster.launches import run_on_two_ranks
from tests.support.training.memory_models import save_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["the cat sat", "a", "on the mat the cat sat and the dog sat too", "dogs and cats"]
CPU = torch.device("cpu")
VOCABULARY = 300
CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    manifest = ModelManifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=CONFIG)
    save_model(build_model(manifest, torch.float32, CPU)[0], CONFIG, folder, torch.float32)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.enable_truncation(3)  # a setting that must not reach the measurement
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def manifest(model_folder: Path) -> ModelManifest:
    return ModelManifest(identity="folder:0", source="folder", folder=str(model_folder), files={}, config=CONFIG)


MakeContext = Callable[..., tuple[Measurement, Context]]


@pytest.fixture
def make(tmp_path: Path, manifest: ModelManifest) -> MakeContext:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    lines = [json.dumps({"prompt": text, "variant": "long" if len(text) > 20 else "short"}) for text in TEXTS]
    (inputs / "abc.jsonl").write_text("\n".join(lines) + "\n")

    def make_context(
        manifest: ModelManifest | None = manifest,
        measuring_pass: MeasuringPass = "timed",
        measuring: dict[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        dtype: Any = "float32",
        engine: Any = "rankwise",
        **work: Any,
    ) -> tuple[Measurement, Context]:
        workload = GenerateWorkload(**{"prompts": "abc", "new_tokens": 5, "batch_size": 3, "num_prompts": 4} | work)
        cell = Cell(model="m", workload=workload, layout=Layout(dp=world_size), dtype=dtype, engine=engine)
        measurement = Measurement(cell=cell, repeat=0, attempt=1)
        rules = Measuring(**{"min_seconds": 0, "min_passes": 2, "warmup": 1} | (measuring or {}))
        job = Job(
            name="job",
            study="s",
            measuring_pass=measuring_pass,
            measuring=rules,
            measurements=(measurement,),
            ranks_per_node=world_size,
            timeout_seconds=60,
            inputs=str(inputs),
            cache=str(tmp_path / "cache"),
        )
        return measurement, Context(job, JobPaths(tmp_path), rank, world_size, CPU, manifest, lambda: None)

    return make_context


def answer_rows(outcome: RankResult) -> dict[int, list[int]]:
    tokens = outcome.samples["answer_tokens"].reshape(len(outcome.samples["answer_prompts"]), -1)
    return {int(place): row.tolist() for place, row in zip(outcome.samples["answer_prompts"], tokens, strict=True)}


@pytest.mark.parametrize(("num", "ranks"), [(1, 1), (7, 3), (8, 3), (3, 3), (100, 7)])
def test_shards_cover_everything_once_in_order_and_equally(num: int, ranks: int) -> None:
    shares = [even_share(num, ranks, rank) for rank in range(ranks)]
    assert [place for share in shares for place in share] == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_every_sample_and_figure_is_there(make: MakeContext) -> None:
    measurement, context = make(measuring={"min_passes": 3, "warmup": 2})
    outcome = generate.run(measurement, context)
    sizes = {name: len(column) for name, column in outcome.samples.items()}
    # 4 prompts in batches of 3: two requests a pass, of 3 and 1 sequences.
    assert sizes == {
        "warmup_pass_seconds": 2,
        "warmup_ttft_seconds": 4,
        "pass_seconds": 3,
        "ttft_seconds": 6,
        "request_seconds": 6,
        "gap_seconds": 24,
        "batch_sequences": 6,
    }
    assert outcome.samples["batch_sequences"].tolist() == [3, 1] * 3
    assert all(column.dtype == np.float64 and (column > 0).all() for column in outcome.samples.values())
    requests = outcome.samples["request_seconds"]
    gaps = outcome.samples["gap_seconds"].reshape(6, 4).sum(1)
    np.testing.assert_allclose(outcome.samples["ttft_seconds"] + gaps, requests, rtol=1e-9)
    assert (requests.reshape(3, 2).sum(1) <= outcome.samples["pass_seconds"]).all()
    figures = outcome.figures
    assert (figures["num_prompts"], figures["new_tokens"], figures["passes"]) == (4, 5, 3)
    assert figures["weights_bytes"] == 4 * int(figures["model_parameters"] or 0) == figures["load_bytes"]
    assert all(float(figures[name] or 0) > 0 for name in ("load_seconds", "preprocess_seconds"))
    again = generate.run(measurement, context).figures
    assert again["load_seconds"] is None and again["weights_hash"] == figures["weights_hash"]


def test_measuring_goes_on_until_the_least_time(make: MakeContext) -> None:
    measurement, context = make(measuring={"min_seconds": 0.2, "min_passes": 1, "warmup": 0})
    outcome = generate.run(measurement, context)
    passes = outcome.samples["pass_seconds"]
    assert passes.sum() >= 0.2 > passes[:-1].sum()
    assert len(outcome.samples["warmup_pass_seconds"]) == 0


def test_a_memory_pass_runs_only_the_largest_request(make: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    decode = Replica.decode

    def watched(replica: Replica, batch: PromptBatch, new_tokens: int) -> list[Decoded]:
        shapes.append(tuple(batch.tokens.shape))
        return decode(replica, batch, new_tokens)

    monkeypatch.setattr(Replica, "decode", watched)
    measurement, context = make(measuring_pass="memory", batch_size=1, answers=True)
    outcome = generate.run(measurement, context)
    longest = max(map(len, prompts_of_rank(measurement.cell.workload, context, ModelConfig.parse(CONFIG)).tokens))  # type: ignore[arg-type]
    assert shapes == [(1, longest)]
    assert outcome.samples == {} and outcome.figures["passes"] == 1


def test_answers_have_their_columns_and_do_not_depend_on_the_batch(make: MakeContext) -> None:
    alone = generate.run(*make(answers=True, batch_size=1))
    together = generate.run(*make(answers=True, batch_size=4))
    measurement, context = make(answers=True)
    lengths = [
        len(ids) for ids in prompts_of_rank(measurement.cell.workload, context, ModelConfig.parse(CONFIG)).tokens
    ]  # type: ignore[arg-type]
    assert min(lengths) == 1 and max(lengths) > 8
    rows = [min(length, 64) for length in lengths]  # there is room for all positions of short prompts
    samples = together.samples
    assert answer_rows(alone) == answer_rows(together)
    assert len({tuple(row) for row in answer_rows(together).values()}) == 4
    assert samples["answer_tokens"].dtype == samples["answer_prompts"].dtype == np.int32
    assert np.bincount(samples["answer_nll_prompts"], minlength=4).tolist() == [length - 1 for length in lengths]
    assert np.bincount(samples["answer_logit_prompts"]).tolist() == rows
    assert together.figures["answer_vocabulary"] == VOCABULARY
    assert samples["answer_logits"].shape == (sum(rows) * VOCABULARY,)
    assert (samples["answer_logits"].dtype, samples["answer_nll"].dtype) == (np.float32, np.float64)
    for name in ("answer_nll", "answer_logits"):
        np.testing.assert_allclose(samples[name], alone.samples[name], rtol=1e-5, atol=1e-5)
    # The last row of logits of a prompt is what its first greedy token comes from.
    last = samples["answer_logits"].reshape(-1, VOCABULARY)[np.cumsum(rows) - 1]
    assert last.argmax(1).tolist() == [row[0] for row in answer_rows(together).values()]


def test_logits_are_kept_of_as_many_prompts_as_fit(make: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_LOGIT_BYTES", 6 * VOCABULARY * 4)
    outcome = generate.run(*make(answers=True))
    kept = [outcome.samples[name].nbytes for name in ("answer_logits", "cached_logits")]
    assert 0 < sum(kept) <= 6 * VOCABULARY * 4
    assert len(np.unique(outcome.samples["answer_logit_prompts"])) < 4
    assert outcome.figures["answer_logit_rows"] == kept[0] // (4 * VOCABULARY)
    assert len(outcome.samples["answer_prompts"]) == 4


@pytest.mark.parametrize("stop", ["", "as_config", "as_generation_config"])
def test_unmodified_transformers_gives_the_same_answers(
    make: MakeContext, manifest: ModelManifest, tmp_path: Path, stop: str
) -> None:
    ours = generate.run(*make(answers=True))
    # A repository's own settings for ending and sampling must not change what is compared.
    folder = tmp_path / "stopping"
    folder.mkdir()
    for path in Path(manifest.folder).iterdir():
        (folder / path.name).symlink_to(path)
    ends = [row[1] for row in answer_rows(ours).values()]
    if stop == "as_config":
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": ends}))
    elif stop:
        settings = {"eos_token_id": ends, "do_sample": True, "temperature": 0.5, "repetition_penalty": 3.0}
        (folder / "generation_config.json").write_text(json.dumps(settings))
    changed = manifest.model_copy(update={"folder": str(folder)})
    theirs = other_engines.run(*make(manifest=changed, answers=True, engine="transformers"))
    assert answer_rows(theirs) == answer_rows(ours)
    assert theirs.figures["weights_hash"] == ours.figures["weights_hash"]
    assert theirs.figures["model_parameters"] == ours.figures["model_parameters"]
    for name, column in ours.samples.items():
        assert theirs.samples[name].shape == column.shape, name
    for name in ("answer_nll", "answer_logits"):
        np.testing.assert_allclose(theirs.samples[name], ours.samples[name], atol=2e-5, rtol=0)


def test_a_synthetic_model_is_the_same_to_both_engines(make: MakeContext) -> None:
    config = ARCHITECTURES["llama-1m"]
    synthetic = ModelManifest(identity="synthetic:llama-1m@7", source="synthetic", folder="", files={}, config=config)
    work: dict[str, Any] = {"prompts": None, "prompt_tokens": 9, "num_prompts": 3, "answers": True}
    ours = generate.run(*make(manifest=synthetic, **work))
    theirs = other_engines.run(*make(manifest=synthetic, engine="transformers", **work))
    assert ours.figures["weights_hash"] == theirs.figures["weights_hash"]
    assert ours.figures["load_bytes"] is None
    assert answer_rows(ours) == answer_rows(theirs)
    np.testing.assert_allclose(theirs.samples["answer_nll"], ours.samples["answer_nll"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_run(make: MakeContext, dtype: str) -> None:
    outcome = generate.run(*make(dtype=dtype, answers=True))
    assert outcome.figures["weights_bytes"] == 2 * int(outcome.figures["model_parameters"] or 0)
    assert np.isfinite(outcome.samples["answer_nll"]).all()


@pytest.mark.parametrize("engine", ["rankwise", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_that_are_not_numbers_fail_the_measurement(
    make: MakeContext, manifest: ModelManifest, tmp_path: Path, engine: str, dtype: str
) -> None:
    """A final norm of NaN: every logit is NaN, and each engine chose word 0 or the first."""
    folder = tmp_path / "spoiled"
    folder.mkdir()
    for path in Path(manifest.folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spoiled = manifest.model_copy(update={"folder": str(folder)})
    run = generate.run if engine == "rankwise" else other_engines.run
    with pytest.raises(FloatingPointError, match=r"^prefill: the logits are not finite numbers. Check the weights"):
        run(*make(manifest=spoiled, engine=engine, dtype=dtype))


def test_a_fault_of_the_cache_is_told_with_its_step(make: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Shard.compute

    def spoiled(shard: Shard, inputs: torch.Tensor, step: Any, last_only: bool) -> torch.Tensor:
        hidden = compute(shard, inputs, step, last_only)
        spoiled.steps = spoiled.steps + 1 if inputs.shape[1] == 1 else 0  # type: ignore[attr-defined]
        return hidden * float("nan") if spoiled.steps == 3 else hidden  # type: ignore[attr-defined]

    monkeypatch.setattr(Shard, "compute", spoiled)
    with pytest.raises(FloatingPointError, match=r"^decode step 3: the logits are not finite numbers"):
        generate.run(*make(num_prompts=3, prompts=None, prompt_tokens=9))


def test_completions_are_written_for_people(make: MakeContext) -> None:
    measurement, context = make(answers=True, num_prompts=6)
    outcome = generate.run(measurement, context)
    path = context.paths.completions(measurement.name, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt_index"] for line in lines] == list(range(6))
    assert [line["prompt"] for line in lines] == [*TEXTS, *TEXTS[:2]]
    assert [line["tokens"] for line in lines] == list(answer_rows(outcome).values())
    assert all(line["completion"] for line in lines)


def test_prompts_are_selected_repeated_and_cut(make: MakeContext) -> None:
    config = ModelConfig.parse(CONFIG)

    def tokens(rank: int = 0, world_size: int = 1, **work: Any) -> list[list[int]]:
        measurement, context = make(rank=rank, world_size=world_size, **work)
        return prompts_of_rank(measurement.cell.workload, context, config).tokens  # type: ignore[arg-type]

    whole = tokens(num_prompts=6)
    assert whole[4:] == whole[:2]
    assert tokens(num_prompts=6, rank=0, world_size=2) + tokens(num_prompts=6, rank=1, world_size=2) == whole
    assert tokens(variant="long", num_prompts=2) == [whole[2]] * 2
    assert tokens(limit=1, num_prompts=2) == [whole[0]] * 2
    fixed = tokens(prompt_tokens=4)
    assert [len(ids) for ids in fixed] == [4] * 4
    assert fixed[1] == whole[1] * 4 and fixed[2] == whole[2][:4]
    random = tokens(prompts=None, num_prompts=5)
    assert {len(ids) for ids in random} == {32} and len({tuple(ids) for ids in random}) == 5
    assert tokens(prompts=None, num_prompts=5, rank=1, world_size=2) == random[3:]
    assert tokens(prompts=None, measuring={"seed": 1}) != tokens(prompts=None)


def test_batches_keep_the_order_and_fill_at_the_left() -> None:
    first, second = batches([[5], [6, 7, 8], [9, 9]], 2, CPU)
    assert first.tokens.tolist() == [[0, 0, 5], [6, 7, 8]] and second.tokens.tolist() == [[9, 9]]
    assert first.padding is not None and first.padding.tolist() == [2, 0] and second.padding is None


def test_a_prompt_that_is_too_long_is_named_by_its_line(make: MakeContext) -> None:
    with pytest.raises(ValueError, match=r"line 1 has 3 tokens, with 62 new ones 65; the model takes 64 .* at most 2"):
        generate.run(*make(new_tokens=62))
    with pytest.raises(ValueError, match=r"workload\.prompt_tokens: a random prompt has 60 tokens"):
        generate.run(*make(prompts=None, prompt_tokens=60))


def test_prompts_without_tokenizer_or_with_a_foreign_one_are_refused(
    make: MakeContext, manifest: ModelManifest
) -> None:
    synthetic = ModelManifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=CONFIG)
    with pytest.raises(ValueError, match="synthetic:tiny@1 brings no tokenizer"):
        generate.run(*make(manifest=synthetic))
    small = synthetic.model_copy(update={"folder": manifest.folder, "config": CONFIG | {"vocab_size": 20}})
    with pytest.raises(ValueError, match="but the model has 20"):
        generate.run(*make(manifest=small))
    with pytest.raises(ValueError, match="this workload runs a model; name one"):
        generate.run(*make(manifest=None))


def test_two_ranks_share_the_prompts_and_the_fate_of_a_measurement(make: MakeContext, tmp_path: Path) -> None:
    alone = generate.run(*make(answers=True, num_prompts=5))
    # First a measurement in which only the third line, in the second rank's share, is too long; the next one must still
    # run.
    too_long, _ = make(world_size=2, num_prompts=4, new_tokens=56)
    measurement, context = make(world_size=2, answers=True, num_prompts=5, measuring={"min_seconds": 0.1})
    job = context.job.model_copy(update={"measurements": (too_long, measurement)})
    refused, figures = run_on_two_ranks(tmp_path, job, context.manifest, "engine.workloads.generate")
    assert "line 3 has" in refused[0]["error"] and refused[0]["error"] == refused[1]["error"]
    samples = [np.load(tmp_path / f"{rank}-1.npz") for rank in (0, 1)]
    assert [part["num_prompts"] for part in figures] == [3, 2]
    assert figures[0]["passes"] == figures[1]["passes"] >= 2
    assert max(part["pass_seconds"].sum() for part in samples) >= 0.1
    assert figures[0]["weights_hash"] == figures[1]["weights_hash"] == alone.figures["weights_hash"]
    merged = np.concatenate([part["answer_tokens"] for part in samples])
    assert np.array_equal(merged, alone.samples["answer_tokens"])
    assert np.concatenate([part["answer_prompts"] for part in samples]).tolist() == list(range(5))
