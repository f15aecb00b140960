"""Train cells as the planner sees them: the engine's own settings, and what is said of cells that it cannot predict."""

from typing import Any

import pytest

from benchmarks.planner.cells import made_up_calibration
from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.catalog import instance
from configs.hardware.hardware import Link, Machine
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture
from engine.planner.memory.framework import DEFAULT, of_engine
from engine.planner.memory.training import training_memory
from engine.planner.trained_cells import DEEPSPEED_BYTES, training_setup

MODEL = read_architecture(ARCHITECTURES["llama-13m"], "llama-13m")
LINK = Link(name="wire", latency_seconds=1e-4, bytes_per_second=119e6)


def nodes() -> Machine:
    here = made_up_calibration().to_machine(2)
    near = Link(name="near", latency_seconds=1e-4, bytes_per_second=1e9)
    return here.model_copy(update={"accelerators": 1, "inside": near, "between": LINK})


def cell(strategy: str = "ddp", dp: int = 2, dtype: str = "float32", tp: int = 1, **work: Any) -> Cell:
    fields = {"global_batch_size": 16, "sequence_length": 64} | work
    layout = Layout(dp=dp, tp=tp, strategy=strategy)  # type: ignore[arg-type]
    return Cell(model="m", workload=TrainWorkload(**fields), layout=layout, dtype=dtype, nodes=dp * tp)  # type: ignore[arg-type]


def test_a_share_of_the_global_batch_is_computed_in_micro_batches() -> None:
    setup = training_setup(cell(micro_batch_size=2), MODEL, nodes())
    assert (setup.micro_batch, setup.accumulation, setup.global_batch) == (2, 4, 16)
    whole = training_setup(cell(), MODEL, nodes())
    assert (whole.micro_batch, whole.accumulation) == (8, 1)


@pytest.mark.parametrize(
    ("strategy", "dtype", "precision"),
    [
        ("ddp", "float32", "float32"),
        ("ddp", "bfloat16", "bfloat16_autocast"),
        ("ddp", "float16", "bfloat16_autocast"),  # of the same sizes
        ("fsdp", "bfloat16", "bfloat16_mixed"),
        ("zero3", "float16", "float16_mixed"),
        ("zero2", "float32", "float32"),
    ],
)
def test_precisions_are_those_of_the_strategies(strategy: str, dtype: str, precision: str) -> None:
    assert training_setup(cell(strategy, dtype=dtype), MODEL, nodes()).precision == precision


def test_what_a_cell_asks_for_reaches_the_setup() -> None:
    asked = cell("zero3", activation_checkpointing="selective", offload="nvme", optimizer="sgd")
    setup = training_setup(asked, MODEL, nodes())
    assert (setup.checkpointing, setup.offload, setup.optimizer) == ("selective", "nvme", "sgd")
    assert training_setup(cell("fsdp", compiled=True), MODEL, nodes()).compiled
    hybrid = training_setup(cell("fsdp", dp=4, sharding="hybrid"), MODEL, instance("aws/p4d.24xlarge"))
    assert hybrid.sharding == "hybrid" and hybrid.shards == 4  # a node of eight holds all four
    assert training_setup(cell("fsdp", offload="cpu"), MODEL, nodes()).offload == "none"  # they are there already
    assert training_setup(cell("fsdp", offload="cpu"), MODEL, instance("aws/p4d.24xlarge")).offload == "cpu"


def test_a_cell_says_what_it_sends_and_waits_for_and_the_peak_behind_mfu() -> None:
    said = predict_cell(cell(), MODEL, nodes())
    assert said.network_bytes_per_step == pytest.approx(4 * MODEL.parameters)
    assert said.step_seconds and said.exposed_communication_seconds
    assert 0 < said.exposed_communication_seconds < said.step_seconds
    assert said.peak_flops == nodes().accelerator.flops("float32") and said.peak_source
    alone = predict_cell(cell("none", dp=1), MODEL, nodes())
    assert alone.network_bytes_per_step is None and alone.exposed_communication_seconds is None
    half = predict_cell(cell(dtype="float16"), MODEL, nodes())
    assert half.step_seconds and "float16" in half.basis


def test_deepspeed_s_libraries_count_in_a_process() -> None:
    said = predict_cell(cell("zero1"), MODEL, nodes())
    setup = training_setup(cell("zero1"), MODEL, nodes())
    tensors = training_memory(setup, of_engine(MODEL.parameters)).tensors
    own = nodes().accelerator.training_framework_bytes
    assert own and said.peak_memory_bytes == tensors + own + DEEPSPEED_BYTES


def test_an_unknown_link_is_the_reason() -> None:
    said = predict_cell(cell(), MODEL, nodes().model_copy(update={"between": None}))
    assert said.throughput is None and "between" in (said.reason or "")


@pytest.mark.parametrize(
    ("architecture", "task", "known"),
    [("bert-1m", "masked_lm", True), ("bert-1m", "text_classification", True), ("bert-1m", "causal_lm", False)],
)
def test_tasks_have_their_kinds_of_model(architecture: str, task: str, known: bool) -> None:
    found: Architecture = read_architecture(ARCHITECTURES[architecture], architecture)
    work = {"task": task, "sequence_length": 32}
    said = predict_cell(cell(**work), found, nodes())
    assert (said.step_seconds is not None and said.peak_memory_bytes is not None) is known
    assert known or "is for a model of kind decoder" in (said.reason or "")


@pytest.mark.parametrize(
    ("model", "task", "trained"),
    [
        ("bert-109m", "masked_lm", "BertForMaskedLM"),
        ("bert-109m", "text_classification", "BertForSequenceClassification"),
        ("gpt2-124m", "causal_lm", "GPT2LMHeadModel"),
        ("gpt2-124m", "text_classification", "GPT2ForSequenceClassification"),
        ("t5-1m", "seq2seq", "T5ForConditionalGeneration"),
    ],
)
def test_the_head_is_that_of_the_task_whatever_class_the_files_name(model: str, task: str, trained: str) -> None:
    work = {"task": task, "sequence_length": 32}

    def said(name: str) -> tuple[float, float]:
        found = read_architecture(ARCHITECTURES[model] | {"architectures": [name]}, model)
        prediction = predict_cell(cell(**work), found, nodes())
        assert prediction.step_seconds and prediction.peak_memory_bytes
        return prediction.step_seconds, prediction.peak_memory_bytes

    stem = {"bert-109m": "Bert", "gpt2-124m": "GPT2", "t5-1m": "T5"}[model]
    for files in ("Model", "ForMaskedLM", "LMHeadModel", "ForSequenceClassification", "ForConditionalGeneration"):
        assert said(f"{stem}{files}") == pytest.approx(said(trained), rel=0.01), files


def test_tokens_of_pairs_are_counted_as_the_engine_counts_them() -> None:
    found = read_architecture(ARCHITECTURES["t5-1m"], "t5-1m")
    said = predict_cell(cell(task="seq2seq", sequence_length=32), found, nodes())
    assert said.tokens_per_second and said.step_seconds
    assert said.tokens_per_second * said.step_seconds == pytest.approx(16 * 2 * 32)  # source and target of each


def test_deepspeed_s_buckets_are_no_longer_than_the_model() -> None:
    small, large = of_engine(1000), of_engine(10**12)
    assert small.reduce_bucket_size == small.prefetch_bucket_size == 1000
    assert large.reduce_bucket_size == DEFAULT.reduce_bucket_size
    assert not small.holds_logits


def test_whole_gradients_of_inner_micro_batches_are_kept_by_fsdp() -> None:
    fields = {"micro_batch_size": 1, "sequence_length": 16}
    setups = [training_setup(cell("fsdp", global_batch_size=n, **fields), MODEL, nodes()) for n in (2, 8)]
    one, four = (training_memory(setup, of_engine(MODEL.parameters)) for setup in setups)
    again = training_memory(setups[1].replace(deferred=False), of_engine(MODEL.parameters))
    # Whole ones in the place of a half, less what of them is in flight where nothing is kept.
    assert 0.8 * 2 * MODEL.parameters < four.tensors - again.tensors < 2 * MODEL.parameters
    assert four.tensors > one.tensors
