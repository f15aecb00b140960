"""The train workload, whole: two ranks follow one, losses fall, what is exported loads again."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.rates import MeasurementSamples, rates_of
from configs.records.record import MeasuringPass
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TRAINING_PARTS, TrainWorkload
from engine.context import Context, RankResult
from engine.training import steps as training_steps
from engine.training.checkpoints.measurement import Checkpoints
from engine.training.network import NetworkBytes
from engine.training.schedule import learning_rate
from engine.training.strategies.torch_trainer import TorchTrainer
from engine.training.task_types import load_examples
from engine.workloads import train
from tests.support.cluster.launches import run_on_two_ranks
from tests.support.training.checkpointed_runs import CONFIG
from tests.support.training.training_tasks import CPU_ATTENTION

CPU = torch.device("cpu")
TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n % 7}\n\n" for n in range(300))

MakeContext = Callable[..., tuple[Measurement, Context]]


@pytest.fixture
def make(tmp_path: Path) -> MakeContext:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "text.txt").write_text(TEXT)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(inputs / "words.json"))

    def make_context(
        measuring_pass: MeasuringPass = "timed",
        measuring: dict[str, Any] | None = None,
        world_size: int = 1,
        layout: Layout | None = None,
        dtype: Any = "float32",
        measurements: int = 1,
        config: dict[str, Any] = CONFIG,
        **work: Any,
    ) -> tuple[Measurement, Context]:
        defaults = {"data": "text", "tokenizer": "words", "global_batch_size": 4, "sequence_length": 16, "steps": 6}
        layout = layout or Layout(dp=world_size)
        cell = Cell(model="m", workload=TrainWorkload(**defaults | work), layout=layout, dtype=dtype)
        made = tuple(Measurement(cell=cell, repeat=repeat, attempt=1) for repeat in range(measurements))
        job = Job(
            name="job",
            study="s",
            measuring_pass=measuring_pass,
            measuring=Measuring(**{"min_seconds": 0, "warmup": 2} | (measuring or {})),
            measurements=made,
            ranks_per_node=world_size,
            timeout_seconds=60,
            inputs=str(inputs),
            cache=str(tmp_path / "cache"),
        )
        manifest = ModelManifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=config)
        return made[0], Context(job, JobPaths(tmp_path), 0, world_size, CPU, manifest, lambda: None)

    return make_context


def run_two_ranks(folder: Path, context: Context) -> tuple[list[dict[str, Any]], list[dict[str, np.ndarray]]]:
    """Figures and samples of both ranks in the last measurement."""
    figures = run_on_two_ranks(folder, context.job, context.manifest, "engine.workloads.train")[-1]
    last = len(context.job.measurements) - 1
    return figures, [dict(np.load(folder / f"{rank}-{last}.npz")) for rank in (0, 1)]


def losses(outcome: RankResult) -> list[float]:
    return [float(loss) for loss in outcome.samples["loss"]]


def test_two_ranks_follow_one(make: MakeContext, tmp_path: Path) -> None:
    # Rates and clipping that bite, so that a wrong average would show.
    work: dict[str, Any] = {"learning_rate": 0.01, "gradient_clipping": 0.3, "heldout_share": 0.1}
    alone = train.run(*make(**work))
    figures, samples = run_two_ranks(tmp_path, make(world_size=2, measurements=2, **work)[1])
    assert len(set(losses(alone))) == 6
    for part in samples:
        np.testing.assert_allclose(part["loss"], alone.samples["loss"], atol=1e-5, rtol=0)
        np.testing.assert_allclose(part["gradient_norm"], alone.samples["gradient_norm"], atol=1e-4, rtol=0)
    for part in samples:
        assert (part["exposed_communication_seconds"] > 0).all()
    gradient_bytes = 4 * alone.figures["model_parameters"]  # type: ignore[operator]
    assert figures[0]["loopback_sent_bytes"] > 4 * gradient_bytes and "loopback_sent_bytes" in figures[0]
    for part in figures:
        assert part["communication_bytes_per_step"] == pytest.approx(gradient_bytes, rel=0.05)
        assert part["sequences"] == 2 and part["tokens_per_step"] == alone.figures["tokens_per_step"] == 64
        assert part["heldout_tokens"] == alone.figures["heldout_tokens"]
        assert part["heldout_loss"] == pytest.approx(alone.figures["heldout_loss"], abs=1e-5)
        assert part["load_seconds"] is None  # the second measurement did not load again


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp=2, strategy="fsdp"), Layout(tp=2)], ids=str)
def test_other_layouts_of_two_ranks_tell_the_same(make: MakeContext, tmp_path: Path, layout: Layout) -> None:
    work: dict[str, Any] = {
        "learning_rate": 0.01, "gradient_clipping": 0.3, "heldout_share": 0.1, "micro_batch_size": 1, "steps": 12,
        "evaluate_every": 4, "target_loss": 0.01, "checkpoint_every": 5,
    }  # fmt: skip
    alone = train.run(*make(**work))
    figures, samples = run_two_ranks(tmp_path, make(world_size=2, layout=layout, **work)[1])
    for part in samples:
        np.testing.assert_allclose(part["loss"], alone.samples["loss"], atol=1e-5, rtol=0)
        np.testing.assert_allclose(part["gradient_norm"], alone.samples["gradient_norm"], atol=1e-4, rtol=0)
    for part in figures:
        assert part["heldout_tokens"] == alone.figures["heldout_tokens"]
        assert part["heldout_loss"] == pytest.approx(alone.figures["heldout_loss"], abs=1e-5)
        assert part["tokens_per_step"] == 64 and part["evaluations"] == 3 and part["checkpoints_written"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_lowers_loss_and_heldout_perplexity(make: MakeContext, dtype: str) -> None:
    outcome = train.run(*make(steps=60, learning_rate=0.01, heldout_share=0.1, dtype=dtype))
    start, end = losses(outcome)[0], losses(outcome)[-1]
    assert start == pytest.approx(math.log(300), abs=0.1)
    assert end < 0.6 * start
    loss, perplexity = outcome.figures["heldout_loss"], outcome.figures["heldout_perplexity"]
    assert isinstance(loss, float) and loss < 0.7 * start
    assert perplexity == pytest.approx(math.exp(loss))


def test_samples_and_figures_say_what_was_done(make: MakeContext) -> None:
    outcome = train.run(*make())
    sizes = {name: len(column) for name, column in outcome.samples.items()}
    parts = dict.fromkeys(TRAINING_PARTS, 4)
    assert sizes == {"warmup_step_seconds": 2, "step_seconds": 4, "loss": 6, "gradient_norm": 6, **parts}
    assert outcome.figures["steps"] == 6 and outcome.figures["sequences"] == 4
    assert outcome.figures["load_bytes"] is None and "heldout_loss" not in outcome.figures


def test_the_parts_of_a_step_are_the_step(make: MakeContext) -> None:
    measurement, context = make(global_batch_size=8, micro_batch_size=2, steps=12)
    outcome = train.run(measurement, context)
    parts = np.stack([outcome.samples[name] for name in TRAINING_PARTS])
    whole = outcome.samples["step_seconds"]
    assert (parts >= 0).all() and (parts.sum(axis=0) <= whole).all()
    assert parts.sum() > 0.9 * whole.sum()
    samples = {f"0/{name}": column for name, column in outcome.samples.items()}
    rates = rates_of(MeasurementSamples(measurement.cell, samples), outcome.figures)
    assert rates.busy_seconds is None and rates.exposed_communication_seconds == 0
    known = [getattr(rates, name) for name in (*TRAINING_PARTS, "other_seconds", "waiting_seconds")]
    assert sum(known) == pytest.approx(rates.wall_seconds / rates.passes)


def test_accumulation_leaves_losses_as_they_are(make: MakeContext) -> None:
    whole = train.run(*make(learning_rate=0.01, gradient_clipping=0.3))
    pieces = train.run(*make(learning_rate=0.01, gradient_clipping=0.3, micro_batch_size=1))
    assert (whole.figures["accumulation"], pieces.figures["accumulation"]) == (1, 4)
    np.testing.assert_allclose(pieces.samples["loss"], whole.samples["loss"], rtol=1e-5)
    np.testing.assert_allclose(pieces.samples["gradient_norm"], whole.samples["gradient_norm"], rtol=1e-5)
    assert pieces.figures["tokens_per_step"] == whole.figures["tokens_per_step"] == 64


def test_float16_scales_its_losses(make: MakeContext) -> None:
    outcome = train.run(*make(dtype="float16", steps=30, learning_rate=0.01))
    scale, skipped = outcome.figures["loss_scale"], outcome.figures["skipped_steps"]
    assert isinstance(scale, float) and scale >= 1 and isinstance(skipped, int) and skipped < 10
    assert losses(outcome)[-1] < 0.8 * losses(outcome)[0]


def test_it_is_evaluated_every_so_many_steps_and_at_the_end(make: MakeContext) -> None:
    outcome = train.run(*make(steps=7, evaluate_every=3, heldout_share=0.1, learning_rate=0.01))
    assert outcome.figures["evaluations"] == 3
    assert outcome.figures["validation_loss"] == outcome.figures["heldout_loss"]
    once = train.run(*make(steps=7, heldout_share=0.1, learning_rate=0.01))
    assert once.figures["evaluations"] == 1
    # To evaluate changes nothing of what is learnt.
    assert losses(once) == losses(outcome)
    assert once.figures["validation_loss"] == outcome.figures["validation_loss"]


@pytest.mark.parametrize("work", [{}, {"heldout_share": 0.1, "evaluate_every": 5}])
def test_a_target_loss_ends_the_training(make: MakeContext, work: dict[str, Any]) -> None:
    outcome = train.run(*make(steps=200, target_loss=4.5, learning_rate=0.01, **work))
    curve = losses(outcome)
    assert 5 <= len(curve) < 100 and outcome.figures["steps"] == len(curve)
    judged = outcome.figures["validation_loss"] if work else sum(curve[-10:]) / 10
    assert isinstance(judged, float) and judged <= 4.5


def test_a_resumed_run_knows_the_loss_that_it_has_reached(make: MakeContext) -> None:
    made = make(steps=200, target_loss=4.5, learning_rate=0.01, checkpoint_every=10, checkpoint_mode="sync")
    first = train.run(*made).figures["steps"]
    assert isinstance(first, int) and first % 10 == 0
    # Two steps of warm-up, and one to measure: not ten.
    assert train.run(*made).figures["steps"] == first + 3


def test_checkpoints_are_no_part_of_a_step(make: MakeContext) -> None:
    outcome = train.run(*make(steps=12, checkpoint_every=4, checkpoint_mode="sync"))
    blocked = outcome.samples["checkpoint_seconds"]
    assert [step for step, seconds in enumerate(blocked) if seconds > 0] == [1, 5, 9]  # after two steps of warm-up
    taken = blocked.sum() + outcome.samples["step_seconds"].sum()
    assert outcome.figures["tokens_per_second_with_checkpoints"] == pytest.approx(64 * 10 / taken)


def test_a_checkpoint_keeps_the_time_of_the_step_after_which_it_is_made(make: MakeContext, tmp_path: Path) -> None:
    outcome = train.run(*make(checkpoint_every=6, checkpoint_mode="sync"))
    [progress] = tmp_path.rglob("step_00000006/progress.json")
    steps = [*outcome.samples["warmup_step_seconds"], *outcome.samples["step_seconds"]]
    assert json.loads(progress.read_text())["history"]["trained_seconds"] == pytest.approx(sum(steps))


def test_bytes_of_an_evaluation_are_none_of_a_step(make: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sent = training_steps.evaluate, [0]

    def gathering(trainer: Any, *rest: Any) -> dict[str, float]:
        trainer.exposed.bytes += 1000  # as sharded weights do
        sent[0] += 1000
        return real(trainer, *rest)

    monkeypatch.setattr(training_steps, "evaluate", gathering)
    monkeypatch.setattr(training_steps, "network_bytes", lambda: NetworkBytes(sent[0], sent[0], sent[0]))
    outcome = train.run(*make(heldout_share=0.1, evaluate_every=1))
    assert sent[0] > 2000
    assert outcome.figures["communication_bytes_per_step"] == 0
    assert [outcome.figures[f"{name}_bytes"] for name in ("network_sent", "network_received", "loopback_sent")] == [
        0
    ] * 3


def test_bytes_of_a_checkpoint_that_blocks_are_none_of_a_step(
    make: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = Checkpoints.after_step, [0]

    def writing(self: Any, history: Any) -> float:
        sent[0] += 1000  # to a folder on another machine
        return real(self, history)

    monkeypatch.setattr(Checkpoints, "after_step", writing)
    monkeypatch.setattr(training_steps, "network_bytes", lambda: NetworkBytes(sent[0], sent[0], sent[0]))
    outcome = train.run(*make(checkpoint_every=2, checkpoint_mode="sync"))
    assert sent[0] > 2000 and outcome.figures["network_sent_bytes"] == 0


def test_flops_are_those_that_torch_counts(make: MakeContext) -> None:
    executed = {}
    for checkpointing in ("none", "selective", "full"):
        measurement, context = make(activation_checkpointing=checkpointing, steps=3)
        running = train.prepare(measurement, measurement.cell.workload, context)  # type: ignore[arg-type]
        (batch,) = running.feed.step(0)
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
            running.trainer.backward(running.trainer.forward(batch), batch, last=True)
        executed[checkpointing] = counter.get_total_flops()
        figures = train.run(measurement, context).figures
        assert figures["hardware_flops_per_step"] == pytest.approx(executed[checkpointing], rel=1e-6)
    assert executed["none"] < executed["selective"] < executed["full"]
    # 6 for each parameter and token, 12 x layers x heads x head_dim x length for attention.
    parameters = figures["model_parameters"]
    assert isinstance(parameters, int)
    width = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    assert figures["model_flops_per_step"] == 64 * (6 * parameters + 12 * 2 * width * 16)


def test_without_steps_time_and_least_steps_decide(make: MakeContext) -> None:
    outcome = train.run(*make(steps=None, measuring={"min_seconds": 0.15, "min_passes": 3}))
    measured = outcome.samples["step_seconds"]
    assert len(measured) >= 3 and measured.sum() >= 0.15
    assert len(measured) == 3 or measured[:-1].sum() < 0.15


def test_every_measurement_starts_from_the_same_weights(make: MakeContext) -> None:
    measurement, context = make(measurements=2)
    first, second = train.run(measurement, context), train.run(measurement, context)
    assert losses(first) == losses(second)
    assert first.figures["weights_hash"] == second.figures["weights_hash"]


def test_random_tokens_need_no_data_and_hold_out_a_share(make: MakeContext) -> None:
    outcome = train.run(*make(data=None, tokenizer=None, heldout_share=0.2))
    assert outcome.figures["heldout_perplexity"] == pytest.approx(300, rel=0.1)


def test_a_memory_pass_takes_two_steps_and_times_nothing(make: MakeContext) -> None:
    outcome = train.run(*make(measuring_pass="memory", heldout_share=0.1, export=True))
    assert outcome.samples == {} and outcome.figures["steps"] == 2
    assert "heldout_loss" not in outcome.figures


def test_a_loss_that_is_no_number_ends_the_measurement(make: MakeContext) -> None:
    with pytest.raises(FloatingPointError, match=r"step \d: loss .*lower workload.learning_rate$"):
        train.run(*make(learning_rate=1e30, weight_decay=0, steps=20))
    with pytest.raises(FloatingPointError, match=r"lower workload.learning_rate or use dtype float32$"):
        train.run(*make(learning_rate=1e30, weight_decay=0, steps=20, dtype="bfloat16"))


def test_a_failed_measurement_leaves_its_memory_to_the_next(make: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed holds in cycles that no collector sees stayed for the rest of the launch."""
    closed = []

    def close(trainer: Any) -> None:
        closed.append(trainer)
        raise RuntimeError("of a state that the failure left")

    monkeypatch.setattr(TorchTrainer, "close", close)
    with pytest.raises(FloatingPointError, match=r"lower workload\.learning_rate"):
        train.run(*make(learning_rate=1e30, weight_decay=0, steps=20))
    assert len(closed) == 1


def test_what_is_exported_loads_in_transformers(make: MakeContext, tmp_path: Path) -> None:
    measurement, context = make(export=True, steps=10, learning_rate=0.01, heldout_share=0.1)
    outcome = train.run(measurement, context)
    folder = context.paths.exports / measurement.cell.key
    peer = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert peer.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = TEXT[:200]
    assert (
        tokenizer(text, add_special_tokens=False).input_ids
        == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    )
    workload = measurement.cell.workload
    assert isinstance(workload, TrainWorkload)
    _, heldout = load_examples(workload, context)
    assert heldout is not None
    numbers = np.arange(heldout.count)
    inputs = heldout.collate(numbers, numbers)
    rows = torch.cat([inputs["tokens"], inputs["targets"][:, -1:]], dim=1)
    loss = peer.float()(input_ids=rows, labels=rows).loss.item()
    assert loss == pytest.approx(outcome.figures["heldout_loss"], abs=0.02)
    assert heldout.count * 16 == outcome.figures["heldout_tokens"]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"sequence_length": 65}, "workload.sequence_length: 65 is more than the model's 64"),
        ({"sequence_length": 60, "heldout_share": 0.001}, "workload.heldout_share: .* fewer than one sequence of 61"),
        ({"data": "short"}, r"workload.data: \d tokens to train on are fewer than one sequence of 17"),
        ({"data": "absent"}, "workload.data: .*absent is missing"),
        ({"data": "latin"}, "workload.data: .*latin.txt: not UTF-8 text"),
        ({"data": "empty"}, "workload.data: .*is empty"),
        ({"tokenizer": None}, "workload.tokenizer: synthetic:tiny@1 brings no tokenizer"),
        ({"tokenizer": "broken"}, "broken.json: not a tokenizer"),
        ({"tokenizer": "absent"}, r"workload.tokenizer: .*absent.json cannot be read"),
        ({"config": CONFIG | {"vocab_size": 50}}, "workload.tokenizer: .* the model has 50"),
        ({"steps": 2}, "workload.steps: 2 leaves none to measure"),
        (
            {"steps": 9, "learning_rate_warmup_steps": 10},
            "workload.learning_rate_warmup_steps: got 10, more than the 9",
        ),
    ],
)
def test_mistakes_are_named_by_field(make: MakeContext, tmp_path: Path, work: dict[str, Any], message: str) -> None:
    inputs = tmp_path / "inputs"
    (inputs / "short.txt").write_text("a b")
    (inputs / "latin.txt").write_bytes(b"caf\xe9")
    (inputs / "empty.txt").write_text("")
    (inputs / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        train.run(*make(**work))


def test_the_rate_grows_with_the_batch_by_the_rule_that_is_asked_for(make: MakeContext) -> None:
    work = {"global_batch_size": 8, "reference_batch_size": 2, "learning_rate": 0.25, "learning_rate_warmup_steps": 2}
    linear = TrainWorkload.model_validate({**work, "learning_rate_scaling": "linear"})
    root = TrainWorkload.model_validate({**work, "learning_rate_scaling": "square_root"})
    assert [learning_rate(linear, step) for step in range(3)] == [0.5, 1.0, 1.0]
    assert [learning_rate(root, step) for step in range(3)] == [0.25, 0.5, 0.5]
    figures = train.run(*make(**work, learning_rate_scaling="square_root")).figures
    assert (figures["learning_rate"], figures["learning_rate_scaling"]) == (0.5, 2.0)


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    workload = TrainWorkload(steps=20, learning_rate=1.0, learning_rate_warmup_steps=4)
    rates = [learning_rate(workload, step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1) and rates[4:] == sorted(rates[4:], reverse=True)
    constant = workload.model_copy(update={"steps": None})
    assert {learning_rate(constant, step) for step in range(4, 50)} == {1.0}


def test_an_evaluation_that_was_interrupted_is_made_by_the_resuming_run(
    make: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of its step had been written before."""
    work: dict[str, Any] = {
        "steps": 7, "checkpoint_every": 3, "checkpoint_mode": "sync", "evaluate_every": 3, "heldout_share": 0.1,
    }  # fmt: skip
    undisturbed = train.run(*make(**work, learning_rate=0.01))

    def interrupted(*_: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_steps, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(*make(**work))
    resumed = train.run(*make(**work))
    assert resumed.figures["resumed_from_step"] == 3
    assert resumed.figures["evaluations"] == undisturbed.figures["evaluations"] == 3
