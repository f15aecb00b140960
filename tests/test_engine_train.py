"""The train workload, whole: two ranks follow one, losses fall, what is exported loads again."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.architectures import ARCHITECTURES
from configs.cell import Cell, Layout
from configs.job import Job, Measuring, Visit
from configs.model import Manifest
from configs.paths import JobPaths
from configs.record import MeasuringPass
from configs.training import TrainWorkload
from engine import tokens, train
from engine.context import Context, Outcome
from engine.tokens import Windows, split_text, text_tokens

CPU = torch.device("cpu")
TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n % 7}\n\n" for n in range(300))
CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}

# Started for each rank: runs all visits of the job, leaves their samples and figures.
RANK_PROGRAM = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from configs.job import Job
from configs.model import Manifest
from configs.paths import JobPaths
from engine import train
from engine.context import Context

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                        timeout=timedelta(seconds=40))
job = Job.model_validate_json((folder / "job.json").read_bytes())
manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
context = Context(job, JobPaths(folder), rank, 2, torch.device("cpu"), manifest, dist.barrier)
for number, visit in enumerate(job.visits):
    outcome = train.run(visit, context)
    np.savez(folder / f"{rank}-{number}.npz", **outcome.samples)
    (folder / f"{rank}-{number}.json").write_text(json.dumps(outcome.figures))
sys.stdout.flush()
os._exit(0)
"""

MakeContext = Callable[..., tuple[Visit, Context]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # Tiny models gain nothing from a second thread, and on a busy machine threads that spin lose much.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        dtype: Any = "float32",
        visits: int = 1,
        config: dict[str, Any] = CONFIG,
        **work: Any,
    ) -> tuple[Visit, Context]:
        defaults = {"data": "text", "tokenizer": "words", "global_batch_size": 4, "sequence_length": 16, "steps": 6}
        cell = Cell(model="m", workload=TrainWorkload(**defaults | work), layout=Layout(dp=world_size), dtype=dtype)
        made = tuple(Visit(cell=cell, repeat=repeat, attempt=1) for repeat in range(visits))
        job = Job(
            name="job",
            study="s",
            measuring_pass=measuring_pass,
            measuring=Measuring(**{"least_seconds": 0, "warmup": 2} | (measuring or {})),
            visits=made,
            ranks_per_node=world_size,
            timeout_seconds=60,
            inputs=str(inputs),
            cache=str(tmp_path / "cache"),
        )
        manifest = Manifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=config)
        return made[0], Context(job, JobPaths(tmp_path), 0, world_size, CPU, manifest, lambda: None)

    return make_context


def run_two_ranks(folder: Path, context: Context) -> tuple[list[dict[str, Any]], list[dict[str, np.ndarray]]]:
    """Figures and samples of both ranks in the last visit."""
    assert context.manifest is not None
    (folder / "job.json").write_text(context.job.model_dump_json())
    (folder / "manifest.json").write_text(context.manifest.model_dump_json())
    program = folder / "rank.py"
    program.write_text(RANK_PROGRAM)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(folder)], env=environment) for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    last = len(context.job.visits) - 1
    figures = [json.loads((folder / f"{rank}-{last}.json").read_text()) for rank in (0, 1)]
    return figures, [dict(np.load(folder / f"{rank}-{last}.npz")) for rank in (0, 1)]


def losses(outcome: Outcome) -> list[float]:
    return [float(loss) for loss in outcome.samples["loss"]]


def test_two_ranks_follow_one(make: MakeContext, tmp_path: Path) -> None:
    # Rates and clipping that bite, so that a wrong average would show.
    work: dict[str, Any] = {"learning_rate": 0.01, "gradient_clipping": 0.3, "heldout_share": 0.1}
    alone = train.run(*make(**work))
    figures, samples = run_two_ranks(tmp_path, make(world_size=2, visits=2, **work)[1])
    assert len(set(losses(alone))) == 6
    for part in samples:
        np.testing.assert_allclose(part["loss"], alone.samples["loss"], atol=1e-5, rtol=0)
        np.testing.assert_allclose(part["gradient_norm"], alone.samples["gradient_norm"], atol=1e-4, rtol=0)
    for part in figures:
        assert part["sequences"] == 2 and part["tokens_per_step"] == alone.figures["tokens_per_step"] == 64
        assert part["heldout_tokens"] == alone.figures["heldout_tokens"]
        assert part["heldout_loss"] == pytest.approx(alone.figures["heldout_loss"], abs=1e-5)
        assert part["load_seconds"] is None  # the second visit did not load again


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
    assert sizes == {"warmup_step_seconds": 2, "step_seconds": 4, "loss": 6, "gradient_norm": 6}
    assert outcome.figures["steps"] == 6 and outcome.figures["sequences"] == 4
    assert outcome.figures["load_bytes"] is None and "heldout_loss" not in outcome.figures
    assert outcome.figures["train_tokens"] == len(text_tokens(*_data(make)))


def _data(make: MakeContext) -> tuple[TrainWorkload, Context, int]:
    visit, context = make()
    assert isinstance(visit.cell.workload, TrainWorkload)
    return visit.cell.workload, context, 300


def test_without_steps_time_and_least_steps_decide(make: MakeContext) -> None:
    outcome = train.run(*make(steps=None, measuring={"least_seconds": 0.15, "least_passes": 3}))
    measured = outcome.samples["step_seconds"]
    assert len(measured) >= 3 and measured.sum() >= 0.15
    assert len(measured) == 3 or measured[:-1].sum() < 0.15


def test_every_visit_starts_from_the_same_weights(make: MakeContext) -> None:
    visit, context = make(visits=2)
    first, second = train.run(visit, context), train.run(visit, context)
    assert losses(first) == losses(second)
    assert first.figures["weights_hash"] == second.figures["weights_hash"]


def test_random_tokens_need_no_data_and_hold_out_a_share(make: MakeContext) -> None:
    outcome = train.run(*make(data=None, tokenizer=None, heldout_share=0.2))
    assert outcome.figures["heldout_perplexity"] == pytest.approx(300, rel=0.1)


def test_a_memory_pass_takes_two_steps_and_times_nothing(make: MakeContext) -> None:
    outcome = train.run(*make(measuring_pass="memory", heldout_share=0.1, export=True))
    assert outcome.samples == {} and outcome.figures["steps"] == 2
    assert "heldout_loss" not in outcome.figures


def test_a_loss_that_is_no_number_ends_the_visit(make: MakeContext) -> None:
    with pytest.raises(FloatingPointError, match=r"step \d: loss .*lower workload.learning_rate"):
        train.run(*make(learning_rate=1e30, weight_decay=0, steps=20))


def test_what_is_exported_loads_in_transformers(make: MakeContext, tmp_path: Path) -> None:
    visit, context = make(export=True, steps=10, learning_rate=0.01, heldout_share=0.1)
    outcome = train.run(visit, context)
    folder = context.paths.exports / visit.cell.key
    peer = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert peer.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = TEXT[:200]
    assert (
        tokenizer(text, add_special_tokens=False).input_ids
        == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    )
    workload = visit.cell.workload
    assert isinstance(workload, TrainWorkload)
    heldout = split_text(text_tokens(workload, context, 300), workload)[1]
    windows = Windows(heldout, 16, 0)
    rows = torch.from_numpy(np.stack([windows.window(number) for number in range(windows.count)]))
    loss = peer.float()(input_ids=rows, labels=rows).loss.item()
    assert loss == pytest.approx(outcome.figures["heldout_loss"], abs=0.02)
    assert windows.count * 16 == outcome.figures["heldout_tokens"]


def test_the_global_batch_is_the_same_for_every_number_of_ranks() -> None:
    windows = Windows(np.arange(161, dtype=np.uint16), 8, seed=5)
    assert windows.count == 20
    whole = windows.rows(range(12, 24))
    again = Windows(np.arange(161, dtype=np.uint16), 8, seed=5)
    parts = np.concatenate([again.rows(range(18, 24)), again.rows(range(12, 18))])
    assert np.array_equal(whole, np.concatenate([parts[6:], parts[:6]]))
    # An epoch holds every window once; the next one is in another order.
    starts = windows.rows(range(40))[:, 0]
    assert sorted(starts[:20]) == sorted(starts[20:]) == list(range(0, 160, 8))
    assert starts[:20].tolist() != starts[20:].tolist()
    assert np.array_equal(whole[:, 1:] - 1, whole[:, :-1])


def test_a_text_is_tokenised_once_and_read_from_the_cache(make: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK_CHARACTERS", 1000)
    first = text_tokens(*_data(make))
    expected = Tokenizer.from_file(str(_data(make)[1].inputs / "words.json"))
    assert expected.decode(first.tolist()) == TEXT
    monkeypatch.setattr(tokens, "_tokenise_text", None)  # a second call would fail
    workload, context, _ = _data(make)
    assert np.array_equal(text_tokens(workload, context, 300), first)
    [cached] = (Path(context.job.cache) / "tokens").iterdir()
    monkeypatch.undo()
    monkeypatch.setattr(tokens, "_CHUNK_CHARACTERS", 1000)
    cached.write_bytes(cached.read_bytes()[:100])
    assert np.array_equal(text_tokens(*_data(make)), first)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"sequence_length": 65}, "workload.sequence_length: 65 is more than the model's 64"),
        ({"sequence_length": 60, "heldout_share": 0.001}, "workload.heldout_share: .* fewer than one sequence of 61"),
        ({"data": "short"}, r"workload.data: \d tokens to train on are fewer than one sequence of 17"),
        ({"data": "absent"}, r"workload.data: .*absent.txt cannot be read \(No such file"),
        ({"data": "latin"}, "workload.data: .*latin.txt is not UTF-8 text"),
        ({"data": "empty"}, "workload.data: .*empty.txt is empty"),
        ({"tokenizer": None}, "workload.tokenizer: synthetic:tiny@1 brings no tokenizer"),
        ({"tokenizer": "broken"}, "broken.json: not a tokenizer"),
        ({"tokenizer": "absent"}, r"workload.tokenizer: .*absent.json cannot be read"),
        ({"config": CONFIG | {"vocab_size": 50}}, "workload.tokenizer: .* the model has 50"),
        ({"steps": 2}, "workload.steps: 2 leaves none to measure"),
        ({"dtype": "float16"}, "dtype: float16 is not trained in"),
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


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    workload = TrainWorkload(steps=20, learning_rate=1.0, learning_rate_warmup_steps=4)
    rates = [train.learning_rate(workload, step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1) and rates[4:] == sorted(rates[4:], reverse=True)
    constant = workload.model_copy(update={"steps": None})
    assert {train.learning_rate(constant, step) for step in range(4, 50)} == {1.0}
