"""Predictions of cells: the arithmetic of passes and steps by hand, memory, interval, price, and what has no answer."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks.planner.cells import made_up_calibration
from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.catalog import accelerator, instance
from configs.hardware.hardware import Link, Machine
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.workloads.noop import NoopWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.catalog import find_model
from engine.planner.cells import RANDOM_PROMPT_TOKENS, Learned, inference_setup, interval, predict_cell
from engine.planner.families import read_architecture
from engine.planner.flops import model_flops
from engine.planner.local import with_cores
from engine.planner.memory.inference import inference_memory
from engine.planner.setup import InferenceSetup, TrainingSetup
from engine.planner.timing.cpu import measured_generation_time, measured_step_time, seconds_at
from engine.planner.timing.inference import generation_time
from engine.planner.trained_cells import EAGER_LAYER_SECONDS

SMALL = read_architecture(ARCHITECTURES["llama-1m"], "llama-1m")
LARGE = read_architecture(ARCHITECTURES["llama-110m"], "llama-110m")
HERE = made_up_calibration().to_machine(1)


ONE = Layout()


def generate(layout: Layout = ONE, dtype: str = "float32", engine: str = "rankwise", **fields: Any) -> Cell:
    work = {"prompt_tokens": 16, "new_tokens": 4, "batch_size": 2, "num_prompts": 2} | fields
    return Cell.model_validate({"model": "m", "workload": work | {"kind": "generate"}, "layout": layout.model_dump(),
                                "dtype": dtype, "engine": engine})  # fmt: skip


def test_random_prompts_are_as_long_as_the_engine_makes_them() -> None:
    from engine.prompts import tokens

    assert RANDOM_PROMPT_TOKENS == tokens.RANDOM_PROMPT_TOKENS


def test_products_take_the_time_between_two_measured_rows() -> None:
    table = {1: 1.0, 4: 4.0, 8: 16.0}
    assert [seconds_at(table, rows) for rows in (0.5, 1, 2, 4, 6, 8, 16)] == [1, 1, 2, 4, 10, 16, 32]


def test_a_decode_step_by_hand() -> None:
    rates = HERE.accelerator.operators
    assert rates is not None
    setup = InferenceSetup(LARGE, HERE, batch=1, prompt_tokens=16, new_tokens=8, weights="float32", compute="float32")
    weights = sum(weight.size * weight.products for weight in LARGE.weights)
    expected = weights * rates.linear["float32"][1]  # far more than the caches hold
    expected += LARGE.layers * (rates.recorded_layer_seconds + LARGE.hidden * rates.element_seconds["float32"])
    cached = 2 * LARGE.layers * LARGE.kv_heads * LARGE.head_dim * 4 * (16 + 4)
    expected += rates.recorded_step_seconds + cached / rates.context_bytes_per_second["float32"]
    assert measured_generation_time(setup).token_seconds == pytest.approx(expected)


def test_stages_of_a_calibrated_machine_work_at_once_on_micro_batches() -> None:
    """Every micro-batch had the prediction of the whole batch, computed by one stage after another."""
    link = Link(name="memory", latency_seconds=1e-4, bytes_per_second=1e9)
    there = made_up_calibration().to_machine(2).model_copy(update={"inside": link})
    rates = {}
    for size in (8, 4, 1):
        cell = generate(Layout(pp=2), prompt_tokens=64, batch_size=8, num_prompts=8, micro_batch_size=size)
        setup = inference_setup(cell, LARGE, there, 64, 8)
        rates[size] = predict_cell(cell, LARGE, there).tokens_per_second
        assert rates[size] == pytest.approx(generation_time(setup).tokens_per_second)
    assert rates[1] and rates[8] and rates[1] < 0.9 * rates[8], "each stage reads its weights eight times"
    assert rates[4] != rates[8]


def test_a_pass_is_over_when_the_rank_with_most_prompts_is() -> None:
    one = predict_cell(generate(num_prompts=2), LARGE, HERE)
    three = predict_cell(generate(num_prompts=6), LARGE, HERE)
    assert one.tokens_per_second == pytest.approx(three.tokens_per_second)
    assert one.ttft_seconds and one.time_per_output_token_seconds and one.tokens_per_second
    seconds = one.ttft_seconds + 3 * one.time_per_output_token_seconds
    assert one.tokens_per_second == pytest.approx(2 * 4 / seconds)
    shared = predict_cell(generate(Layout(dp=2), num_prompts=3, batch_size=1), LARGE, HERE)
    alone = predict_cell(generate(num_prompts=1, batch_size=1), LARGE, HERE)
    assert shared.tokens_per_second and alone.tokens_per_second
    # Two prompts on one rank, one on the other: 3 prompts in the time of 2.
    assert shared.tokens_per_second == pytest.approx(1.5 * alone.tokens_per_second)


def test_a_last_batch_that_is_not_full_takes_its_own_time() -> None:
    found = predict_cell(generate(num_prompts=3), LARGE, HERE)
    full, rest = (predict_cell(generate(num_prompts=n, batch_size=n), LARGE, HERE) for n in (2, 1))
    assert found.tokens_per_second and full.tokens_per_second and rest.tokens_per_second
    assert 12 / found.tokens_per_second == pytest.approx(8 / full.tokens_per_second + 4 / rest.tokens_per_second)
    assert found.ttft_seconds == full.ttft_seconds


def test_batches_are_filled_up_to_their_longest_prompt() -> None:
    cell = generate(prompt_tokens=None, prompts="file", num_prompts=4)
    found = predict_cell(cell, LARGE, HERE, prompt_lengths=[10, 20, 30, 40])
    known = predict_cell(generate(prompt_tokens=30, num_prompts=4), LARGE, HERE)
    assert found.ttft_seconds == known.ttft_seconds
    assert "prompts taken for 32 tokens" in predict_cell(cell, LARGE, HERE).basis


def test_one_token_has_no_time_between_tokens() -> None:
    assert predict_cell(generate(new_tokens=1), LARGE, HERE).time_per_output_token_seconds is None


def test_training_adds_up_and_pays_for_the_sum_of_gradients() -> None:
    def cell(layout: Layout, batch: int) -> Cell:
        work = TrainWorkload(global_batch_size=batch, sequence_length=32)
        return Cell(model="m", workload=work, layout=layout)

    found = predict_cell(cell(Layout(), 4), LARGE, HERE)
    setup = TrainingSetup(LARGE, HERE, micro_batch=4, sequence_length=32, precision="float32")
    time = measured_step_time(setup)
    assert found.step_seconds == time.seconds and found.tokens_per_second == pytest.approx(128 / time.seconds)
    rates = HERE.accelerator.operators
    assert rates is not None
    weights = sum(weight.size * weight.products for weight in LARGE.weights)
    assert time.compute_seconds > 6 * 128 * weights / rates.training_flops["float32"]
    assert time.model_flops == model_flops(LARGE, 128, 32), "as records count them, tables included"
    assert time.optimizer_seconds == pytest.approx(LARGE.parameters * rates.parameter_seconds)
    pair = made_up_calibration().to_machine(2).model_copy(update={"inside": None, "accelerators": 2})
    unlinked = predict_cell(cell(Layout(dp=2), 8), LARGE, pair)
    assert unlinked.tokens_per_second is None and "link" in (unlinked.reason or "")
    linked = pair.model_copy(update={"inside": accelerator("t4").link or instance("aws/p5.48xlarge").neighbour})
    assert linked.inside is not None
    shared = predict_cell(cell(Layout(dp=2), 8), LARGE, linked)
    assert shared.step_seconds and found.step_seconds and shared.step_seconds > found.step_seconds


def test_noop_is_its_own_prediction() -> None:
    work = NoopWorkload(seconds=0.1, items=5)
    found = predict_cell(Cell(workload=work, layout=Layout(dp=2)), None, HERE)
    assert found.items_per_second == pytest.approx(5 / 0.3)
    assert predict_cell(Cell(workload=NoopWorkload(seconds=0)), None, HERE).reason


def test_memory_is_that_of_the_process_on_a_cpu_and_of_tensors_on_a_gpu() -> None:
    found = predict_cell(generate(), LARGE, HERE)
    setup = InferenceSetup(LARGE, HERE, batch=2, prompt_tokens=16, new_tokens=4, weights="float32", compute="float32")
    tensors = inference_memory(setup).tensors
    assert found.peak_memory_bytes == tensors + made_up_calibration().framework_bytes and found.fits
    gpu = Machine(name="one", accelerator=accelerator("t4"), accelerators=1)
    assert predict_cell(generate(), LARGE, gpu).peak_memory_bytes == tensors
    little = HERE.model_copy(update={"host_memory_bytes": (found.peak_memory_bytes or 0) * 3 // 2})
    assert predict_cell(generate(), LARGE, little).fits
    both = little.model_copy(update={"accelerators": 2})
    assert predict_cell(generate(Layout(dp=2)), LARGE, both).fits is False


def test_a_gpu_waits_for_operators_that_are_issued_one_by_one() -> None:
    fast = Machine(name="one", accelerator=accelerator("h100-80gb"))
    found = predict_cell(generate(), SMALL, fast)
    assert found.ttft_seconds == pytest.approx(SMALL.layers * EAGER_LAYER_SECONDS)


def test_a_decode_step_on_a_gpu_is_recorded_and_waits_for_nothing() -> None:
    """An H200 decodes Llama-3.2-1B's shape at 32 x 1 / 1.21 ms (docs/measurements/gpu.md), where 3.2 ms were said."""
    h200 = Machine(name="one", accelerator=accelerator("h200"))
    work = {"prompt_tokens": 64, "new_tokens": 64, "batch_size": 32, "num_prompts": 32}
    found = predict_cell(generate(dtype="bfloat16", **work), find_model("llama-3.2-1b"), h200)
    measured = 32 / 26_413
    assert found.time_per_output_token_seconds and found.factor
    assert measured / found.factor < found.time_per_output_token_seconds < measured * found.factor


def test_dollars_are_those_of_whole_nodes() -> None:
    priced = HERE.model_copy(update={"usd_per_hour": 3.6})
    found = predict_cell(generate(), LARGE, priced)
    assert found.tokens_per_second
    assert found.usd_per_million_tokens == pytest.approx(1e6 * 0.001 / found.tokens_per_second)
    assert predict_cell(generate(), LARGE, HERE).usd_per_million_tokens is None


def test_what_was_learnt_multiplies_times_and_divides_rates() -> None:
    cell = generate()
    plain = predict_cell(cell, LARGE, HERE)
    taught = predict_cell(cell, LARGE, HERE, lambda *_: Learned(2.0, 1.1, 7))
    assert plain.tokens_per_second and plain.ttft_seconds and plain.correction is None and plain.learnt_from == 0
    assert taught.tokens_per_second == pytest.approx(plain.tokens_per_second / 2)
    assert taught.ttft_seconds == pytest.approx(2 * plain.ttft_seconds)
    assert taught.peak_memory_bytes == plain.peak_memory_bytes
    assert (taught.correction, taught.learnt_from, taught.factor) == (2.0, 7, 1.1)


def test_the_interval_is_wider_the_less_is_known() -> None:
    rough = HERE.model_copy(update={"accelerator": HERE.accelerator.model_copy(update={"operators": None})})
    gpu = Machine(name="one", accelerator=accelerator("t4"))
    factors = [predict_cell(generate(), LARGE, machine).factor or 0 for machine in (HERE, gpu, rough)]
    assert factors == sorted(factors) and factors[0] > 1
    assert interval(10.0, 2.0) == (5.0, 20.0) and interval(10.0, None) is None


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("transformers", Layout()),
        ("transformers", Layout(tp=2)),
        ("deepspeed", Layout(tp=2)),
        ("onnxruntime", Layout()),
    ],
)
def test_another_engine_is_never_predicted_as_ours(engine: str, layout: Layout) -> None:
    said = predict_cell(generate(layout, engine=engine), LARGE, HERE, lambda *_: Learned(2.0, 1.1, 7))
    assert said.reason == f"engine {engine}: not predicted, only Rankwise's own engine is modelled"
    assert said.model_dump(exclude={"reason"}) == Prediction().model_dump(exclude={"reason"})


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (generate(prompt_tokens=2040, new_tokens=16), "2040 + 16 tokens are more than the model's 2048"),
        (Cell(model="m", workload=TrainWorkload(sequence_length=4096)), "more than the model's 2048 positions"),
        (Cell(model="m", workload=TrainWorkload(task="masked_lm")), "masked_lm is for a model of kind encoder"),
    ],
)
def test_what_cannot_be_run_has_a_reason_and_no_figure(cell: Cell, reason: str) -> None:
    found = predict_cell(cell, LARGE, HERE)
    assert found.throughput is None and reason in (found.reason or "")
    assert predict_cell(generate(), None, HERE).reason == "the model's architecture is not known"


def test_more_cores_share_the_products_and_not_the_issuing() -> None:
    cell = generate().model_copy(update={"cores_per_rank": 4})
    one, four = predict_cell(generate(), LARGE, HERE), predict_cell(cell, LARGE, with_cores(HERE, 4))
    assert one.ttft_seconds and four.ttft_seconds and one.factor and four.factor
    assert 1 < one.ttft_seconds / four.ttft_seconds < 4
    assert four.factor > one.factor


def test_tensor_parallelism_over_slow_links_costs_a_sum_for_each_split_product() -> None:
    link = instance("aws/p5.48xlarge").neighbour
    machine = made_up_calibration().to_machine(2).model_copy(update={"inside": link, "accelerators": 2})
    setup = InferenceSetup(LARGE, machine, layout=Layout(tp=2), batch=1, prompt_tokens=8, new_tokens=8,
                           weights="float32", compute="float32")  # fmt: skip
    time = measured_generation_time(setup)
    assert link is not None and time.token_communication_seconds >= 2 * LARGE.layers * link.latency_seconds


def test_predicting_imports_no_torch() -> None:
    code = (
        "import sys, engine.planner.cells, engine.planner.learning, engine.planner.local; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("share", "expected"), [(None, 1.4), (0.05, 1.4), (0.1, 1.4), (0.3, 2.0), (0.71, 3.0), (1.0, 3.0)]
)
def test_a_calibration_among_busy_neighbours_is_trusted_less(share: float | None, expected: float) -> None:
    calibration = made_up_calibration().model_copy(update={"others_cpu_share": share})
    assert predict_cell(generate(), SMALL, calibration.to_machine(1)).factor == pytest.approx(expected)


def prompted(kind: str, **fields: Any) -> Cell:
    work = {"kind": kind, "prompt_tokens": 16, "batch_size": 2, "num_prompts": 4}
    compression = fields.pop("compression", ())
    return Cell.model_validate({"model": "m", "workload": work | fields, "compression": compression})


BERT = read_architecture(
    {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
    },
    "bert",
)
T5 = read_architecture(
    {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 256,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
    },
    "t5",
)


def test_an_encoder_has_embeddings_and_no_decode() -> None:
    said = predict_cell(prompted("encode"), BERT, HERE)
    assert said.reason is None and said.embeddings_per_second is not None and said.fits
    assert said.throughput == said.embeddings_per_second
    assert said.tokens_per_second is None and said.ttft_seconds is None and said.usd_per_million_tokens is None
    longer = predict_cell(prompted("encode", prompt_tokens=64), BERT, HERE)
    assert longer.embeddings_per_second is not None and longer.embeddings_per_second < said.embeddings_per_second


def test_an_encoder_decoder_reads_its_source_first() -> None:
    short, long = (predict_cell(prompted("seq2seq", prompt_tokens=n, new_tokens=8), T5, HERE) for n in (8, 128))
    assert short.ttft_seconds is not None and long.ttft_seconds is not None and short.tokens_per_second is not None
    assert long.ttft_seconds > short.ttft_seconds
    assert short.time_per_output_token_seconds is not None and short.peak_memory_bytes is not None
    assert long.peak_memory_bytes is not None and long.peak_memory_bytes > short.peak_memory_bytes


def test_a_window_spares_reading_and_no_memory_of_the_cache() -> None:
    """`engine.inference.cache` has a place for each position of each layer: of a long context a share was counted."""
    config = ARCHITECTURES["mistral-1m"] | {"max_position_embeddings": 32768}
    windowed, whole = (read_architecture(config | {"sliding_window": width}, "m") for width in (96, None))
    node = Machine(name="node", accelerator=accelerator("a100-80gb"), accelerators=1)
    long = generate(prompt_tokens=16384, new_tokens=64, batch_size=64, num_prompts=64)
    said, wanted = (predict_cell(long, each, node) for each in (windowed, whole))
    assert said.peak_memory_bytes == wanted.peak_memory_bytes
    cache = 2 * 4 * whole.layers * whole.kv_heads * whole.head_dim * 64 * (16384 + 64)
    assert said.peak_memory_bytes and said.peak_memory_bytes > cache
    assert said.tokens_per_second and wanted.tokens_per_second and said.tokens_per_second > wanted.tokens_per_second


def test_a_model_whose_positions_are_distances_takes_longer_sequences_than_it_was_made_for() -> None:
    t5 = read_architecture(ARCHITECTURES["t5-1m"], "t5-1m")
    assert t5.max_positions == 512
    assert predict_cell(prompted("seq2seq", prompt_tokens=600, new_tokens=8), t5, HERE).tokens_per_second
    work = TrainWorkload(task="seq2seq", sequence_length=600, global_batch_size=2)
    assert predict_cell(Cell(model="m", workload=work), t5, HERE).tokens_per_second
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "seq_length": 512}
    trained = Cell(model="m", workload=TrainWorkload(sequence_length=600, global_batch_size=2))
    assert predict_cell(trained, read_architecture(bloom, "bloom"), HERE).tokens_per_second


@pytest.mark.parametrize(("kind", "architecture"), [("encode", SMALL), ("seq2seq", BERT), ("generate", T5)])
def test_work_of_another_kind_of_model_is_not_predicted(kind: str, architecture: Any) -> None:
    said = predict_cell(prompted(kind), architecture, HERE)
    assert said.throughput is None and f"{kind} is for a model of kind" in (said.reason or "")


def test_compressed_weights_are_fewer_bytes_to_hold_and_to_read() -> None:
    gpu = instance("aws/g5.xlarge")
    names = ("none", "int8", "int4", "prune_50")
    half = {"dtype": "bfloat16"}
    cells = {name: prompted("generate", new_tokens=32, compression=name).model_copy(update=half) for name in names}
    said = {name: predict_cell(cell, LARGE, gpu) for name, cell in cells.items()}
    peaks = [said[name].peak_memory_bytes or 0 for name in ("int4", "int8", "none")]
    assert 0 < peaks[0] < peaks[1] < peaks[2] == said["prune_50"].peak_memory_bytes
    rates = [said[name].tokens_per_second or 0 for name in ("none", "int4")]
    assert 0 < rates[0] <= rates[1]
    calibrated = predict_cell(cells["int8"], LARGE, HERE)  # its operators were measured with whole weights
    assert calibrated.tokens_per_second is not None


def test_a_gpu_is_promised_what_its_kernels_do() -> None:
    a10g, t4, h100 = (instance(name) for name in ("aws/g5.xlarge", "aws/g4dn.xlarge", "aws/p5.48xlarge"))

    def said(name: str, machine: Machine, dtype: str = "bfloat16") -> Prediction:
        cell = prompted("generate", new_tokens=32, compression=name).model_copy(update={"dtype": dtype})
        return predict_cell(cell, LARGE, machine)

    assert "8.9 or more, and this one has 8.0" in (said("float8", a10g).reason or "")
    assert "multiplies bfloat16, not float16" in (said("int4", a10g, "float16").reason or "")
    assert said("int4", t4, "float16").throughput is None and said("float8", h100).throughput is not None
    # Many small kernels round the inputs of int8: of a small model they cost more than fewer bytes save.
    assert (said("int8", a10g).throughput or 0) < (said("none", a10g).throughput or 0)


@pytest.mark.parametrize("machine", ["aws/g4dn.xlarge", "aws/p3.2xlarge"])
def test_bfloat16_is_not_promised_where_ranks_are_refused_it(machine: str) -> None:
    """Turing and Volta have float16 alone; its rate was given for bfloat16, and the run was `unsupported`."""
    there = instance(machine)
    for cell in (prompted("generate", new_tokens=4), Cell(model="m", workload=TrainWorkload())):
        said = {dtype: predict_cell(cell.model_copy(update={"dtype": dtype}), LARGE, there)
                for dtype in ("bfloat16", "float16", "float32")}  # fmt: skip
        assert said["bfloat16"].throughput is None
        assert said["bfloat16"].reason == f"{there.accelerator.title} has no bfloat16. Use float16 or float32"
        assert said["float16"].throughput is not None and said["float32"].throughput is not None
    ampere = predict_cell(prompted("generate", new_tokens=4).model_copy(update={"dtype": "bfloat16"}), LARGE,
                          instance("aws/g5.xlarge"))  # fmt: skip
    assert ampere.throughput is not None


def test_a_cpu_that_widens_weights_promises_nothing_for_it() -> None:
    cell = prompted("generate", new_tokens=32, compression="float8")
    assert "a CPU widens float8 weights" in (predict_cell(cell, LARGE, HERE).reason or "")


def test_a_level_of_compression_is_not_guessed() -> None:
    said = predict_cell(prompted("generate", compression="balanced"), SMALL, HERE)
    assert said.throughput is None and said.reason == "what balanced becomes is known on the machine alone"
