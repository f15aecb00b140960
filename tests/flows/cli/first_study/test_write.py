"""`rankwise init`: what a script's source shows, and that what is written can be run; `rankwise schema`."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from configs.spec.study import load_study
from engine.scripts.line_figures import number
from flows.cli.first_study.script_reading import script_facts
from flows.cli.first_study.write import init_study
from flows.cli.main import app

PLAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--seq-len", type=int, default=128)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()
print(f"starting {args.out}")
for step in range(10):
    print(f"step {step} loss {loss:.2f} tok/s {rate:.0f}")
    logger.info(f"took {dt:.1f} ms")
"""


def written(folder: Path, source: str) -> Path:
    (folder / "train.py").write_text(source)
    return folder / "train.py"


def test_a_script_with_options_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init_study(written(tmp_path, PLAIN), tmp_path / "study.yaml", 8, None) == 0
    said = capsys.readouterr().out
    assert 'prints "step {step} loss {loss:.2f} tok/s {rate:.0f}"' in said
    assert "weak scaling over dp = 1 to 8, torchrun; steps are read from its lines" in said
    work = load_study(tmp_path / "study.yaml").workload.model_dump()
    assert work["command"] == (
        "train.py", "--micro-batch", "{micro_batch_size}", "--lr", "{params.lr}", "--seq-len", "{sequence_length}",
        "--seed", "{repeat}",
    )  # fmt: skip
    assert work["tokens_per_step"] == "{micro_batch_size} * {sequence_length} * {dp}"
    found = re.search(work["lines"]["pattern"], "step 7 loss 3.21 tok/s 8123")
    assert found and found.groupdict() == {"step": "7", "loss": "3.21", "units_per_second": "8123"}
    comments = [line for line in (tmp_path / "study.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("throughput is counted by tokens_per_step" in line for line in comments)
    only_loss = PLAIN.replace(" tok/s {rate:.0f}", "")
    assert only_loss != PLAIN
    init_study(written(tmp_path, only_loss), tmp_path / "without.yaml", 8, None)
    assert "throughput is counted" not in (tmp_path / "without.yaml").read_text()


def test_options_without_a_value_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--fp16` and `--compile` were neither said to be taken nor among the further options"""
    more = """
parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
parser.add_argument("--log", action="append")
parser.add_argument("--verbose", action="count")
parser.add_argument("--batch-size", action="store_true")
parser.add_argument("--version", action="version", version="1")
args = parser.parse_args()
"""
    init_study(written(tmp_path, PLAIN.replace("args = parser.parse_args()\n", more)), tmp_path / "s.yaml", 8, None)
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith(
        "train.py takes --micro-batch, --lr, --seq-len, --seed, --fp16, --out, --compile, --log and 2 m"
    )
    comments = (tmp_path / "s.yaml").read_text()
    assert "options of the script: --fp16 --out --compile --log --verbose --batch-size\n" in comments
    assert load_study(tmp_path / "s.yaml").workload.model_dump()["command"][1] == "--micro-batch"


@pytest.mark.parametrize(
    ("printed", "line", "groups", "unit"),
    [
        ("step {i} loss {loss:.2f}", "step 7 loss nan", {"step": "7", "loss": "nan"}, None),
        ("step {i} tok/s {rate:.1f}k", "step 7 tok/s 8.1k", {"step": "7", "units_per_second": "8.1k"}, None),
        ("step {i} data {d:.1f} ms time {t:.2f} s", "step 7 data 20.0 ms time 0.50 s", {"step_seconds": "0.50"}, None),
        ("step {i} data {d:.1f} s time {t:.0f} ms", "step 7 data 0.1 s time 500 ms", {"step_seconds": "500"}, "ms"),
    ],
)
def test_numbers_of_lines_are_read_as_they_are_printed(
    printed: str, line: str, groups: dict[str, str], unit: str | None, tmp_path: Path
) -> None:
    """A loss that is no number, a thousand as `k`, and a time whose unit is not that of another one of the line."""
    init_study(written(tmp_path, f"import torch\nprint(f{printed!r})"), tmp_path / "study.yaml", 2, None)
    lines = load_study(tmp_path / "study.yaml").workload.model_dump()["lines"]
    found = re.search(lines["pattern"], line)
    assert found and groups.items() <= found.groupdict().items()
    assert lines["units"].get("step_seconds") == unit


SUMMARISED = """# -*- coding: latin-1 -*-
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--seq-len", type=int, required=True)
for step in range(10):
    if step % 5 == 0:
        print(f"step {step} für {loss:.2f} elapsed {now - begin:.1f} s")
print(f"total time {now - begin:.1f} s")
"""


def test_a_line_of_each_step_comes_before_a_summary(tmp_path: Path) -> None:
    """The time of the whole run was that of a step; so was the time since the start, in a line of each step."""
    (tmp_path / "train.py").write_bytes(SUMMARISED.encode("latin-1"))
    init_study(tmp_path / "train.py", tmp_path / "study.yaml", 2, None)
    found = load_study(tmp_path / "study.yaml").workload.model_dump()["lines"]["pattern"]
    matched = re.search(found, "step 5 für 0.31 elapsed 12.5 s")
    assert matched and matched["step"] == "5" and "step_seconds" not in matched.groupdict()
    assert "# The script does not start without --seq-len: add a value" in (tmp_path / "study.yaml").read_text()


@pytest.mark.parametrize("answer", ["two", "0", "-1", ""])
def test_an_answer_that_is_no_number_of_ranks_is_named(answer: str, tmp_path: Path) -> None:
    script = written(tmp_path, PLAIN)
    with pytest.raises(ValueError, match=r"Largest number of ranks: got .*, expected a whole number of at least 1"):
        init_study(script, tmp_path / "s.yaml", 2, lambda question, default: answer if "Larg" in question else default)


@pytest.mark.parametrize(
    ("source", "launcher", "measure"),
    [
        ("import torch\nfrom rankwise_probe import step", "torchrun", "probe"),
        ("from transformers import Trainer\nTrainer()", "torchrun", "hf_trainer"),
        ("from trl import SFTTrainer\nSFTTrainer()", "torchrun", "hf_trainer"),
        ("import lightning as L\nL.Trainer()", "torchrun", "lightning"),
        ("import deepspeed, torch", "deepspeed", "wall"),
        ("from accelerate import Accelerator", "accelerate", "wall"),
        ("import torch\nprint(f'iter {i}: time {dt * 1e3:.1f} ms')", "torchrun", "lines"),
        ("print('no library')", "none", "wall"),
    ],
)
def test_frameworks(source: str, launcher: str, measure: str, tmp_path: Path) -> None:
    path = written(tmp_path, source)
    facts = script_facts(path)
    assert (facts.launcher, facts.measure) == (launcher, measure)
    assert init_study(path, tmp_path / "study.yaml", 2, None) == 0
    load_study(tmp_path / "study.yaml")


def test_of_a_script_without_a_launcher_ranks_are_not_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `one cell, none`, and nothing of the eight ranks that were asked for."""
    init_study(written(tmp_path, "print('no library')"), tmp_path / "study.yaml", 8, None)
    said = capsys.readouterr().out
    assert "one cell of one process, without a launcher, so --ranks has no effect; " in said
    assert said.startswith("train.py takes no options of argparse or click\n")  # Hydra, Fire and others may take some


def test_nothing_of_the_script_runs_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    study = tmp_path / "study.yaml"
    assert CliRunner().invoke(app, ["init", "--from", str(path), "--output", str(study)]).exit_code == 0
    assert not (tmp_path / "ran").exists()
    again = CliRunner().invoke(app, ["init", "--from", str(path), "--output", str(study)])
    assert again.exit_code == 2 and "exists already" in again.output
    broken = CliRunner().invoke(
        app, ["init", "--from", str(written(tmp_path, "def (")), "--output", str(tmp_path / "b")]
    )
    assert broken.exit_code == 1 and "not a Python script" in broken.output


def test_questions_where_there_is_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN)
    answers = {"Script": "train.py", "Launcher": "deepspeed", "Largest": "4"}

    def ask(question: str, default: str) -> str:
        return next(answer for word, answer in answers.items() if question.startswith(word))

    assert init_study(None, tmp_path / "study.yaml", 2, ask) == 0
    study = load_study(tmp_path / "study.yaml").model_dump()
    assert (study["workload"]["launcher"], study["experiments"]["scaling"]["to"]) == ("deepspeed", 4)


def test_the_schema_takes_what_is_written(tmp_path: Path) -> None:
    from configs.common.files.yaml_text import parse_yaml

    schema = json.loads(CliRunner().invoke(app, ["schema"]).output)
    init_study(written(tmp_path, PLAIN), tmp_path / "study.yaml", 2, None)
    data = parse_yaml((tmp_path / "study.yaml").read_text())
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"studdy": 1}, schema)


REQUIRING = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("extra", nargs="?")
parser.add_argument("--batch", type=int, default=4, required=True)
parser.add_argument("-o", "--out-dir", required=True)
parser.add_argument("--epochs", type=int, default=1)
"""
CLICKED = """
import click, torch
@click.command()
@click.argument("data")
@click.argument("more", nargs=-1)
@click.argument("split", default="train")
@click.option("--out", required=True)
def main(data, more, split, out): ...
"""
HF_ARGUMENTS = """
from dataclasses import dataclass, field
from transformers import HfArgumentParser, Trainer, TrainingArguments
@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "which"})
    cache_dir: str = field(default=None)
    revision: str = "main"
@dataclass
class Unused:
    nothing: str
@dataclass
class Own(TrainingArguments):
    out: str
parser = HfArgumentParser((ModelArguments, CLASS))
Trainer()
"""


@pytest.mark.parametrize(
    ("of_trainer", "flags"), [("Own", True), ("TrainingArguments", True), ("Data", False), ("classes", True)]
)
def test_arguments_of_hf_parsers(of_trainer: str, flags: bool, tmp_path: Path) -> None:
    """Fields without a default were not named, and TrainingArguments were taken for granted: the script's usage."""
    facts = script_facts(written(tmp_path, HF_ARGUMENTS.replace("CLASS", of_trainer)))
    assert facts.required == ("--model_name_or_path", *(["--out"] if of_trainer == "Own" else []))
    assert ("--learning_rate" in [option.flag for option in facts.options]) == bool(facts.fixed) == flags


@pytest.mark.parametrize(("source", "named"), [(REQUIRING, "data, --out-dir"), (CLICKED, "data, --out")])
def test_what_a_script_does_not_start_without_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, named: str
) -> None:
    """The first run ended with argparse's usage, and nothing had said what was missing."""
    init_study(written(tmp_path, source), tmp_path / "study.yaml", 2, None)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"add a value of {named} to its command, then rankwise run {tmp_path / 'study.yaml'}"
    text = (tmp_path / "study.yaml").read_text()
    assert f"# The script does not start without {named}: add a value to command.\n" in text
    assert "Further options of the script: --epochs\n" in text or "--epochs" not in source


@pytest.mark.parametrize("told", ["10 steps took {took:.2f} s", "time per 10 iterations {took:.2f}s"])
def test_a_time_of_several_steps_is_no_time_of_a_step(told: str, tmp_path: Path) -> None:
    """It was read as that of one step, ten times what it is; without it, the time between lines is divided."""
    script = tmp_path / "train.py"
    script.write_text(f'for step in range(9):\n    print(f"step {{step}} loss {{loss:.3f}}, {told}")\n')
    facts = script_facts(script)
    assert facts.measure == "lines" and facts.pattern is not None
    assert list(re.compile(facts.pattern).groupindex) == ["step", "loss"]


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (r"\rstep {i} loss {loss:.3f} {dt * 1e3:.1f} ms\n", "step 7 loss 0.5 12.0 ms"),
        (r"\nstep {i} loss {loss:.3f}\n  lr {lr} in {took:.2f} s\n", "step 7 loss 0.5"),
        (r"\033[92mstep {i}\033[0m loss {loss:.3f}", "step 7 loss 0.5"),
        (r"epoch {e}\tstep {i}\tloss {loss:.3f} ", "epoch 1\tstep 7\tloss 0.5"),
        (r"step {i:<6d}| loss {loss:<9.4f}| tok/s {rate:<6.1f}k |", "step 7     | loss 0.5000   | tok/s 8.1   k |"),
    ],
)
def test_lines_are_matched_as_they_are_read(printed: str, line: str, tmp_path: Path) -> None:
    """Ends of lines and colours were part of the pattern: no line matched, or the study was refused."""
    script = written(tmp_path, f'import torch\nfor i in range(9):\n    sys.stdout.write(f"{printed}")')
    assert init_study(script, tmp_path / "study.yaml", 2, None) == 0
    found = re.search(load_study(tmp_path / "study.yaml").workload.model_dump()["lines"]["pattern"], line)
    assert found is not None and found["step"] == "7" and number(found["loss"]) == 0.5
    assert "units_per_second" not in found.groupdict() or number(found["units_per_second"]) == 8100


def test_a_line_whose_colour_is_inserted_is_no_source_of_steps(tmp_path: Path) -> None:
    script = written(tmp_path, r"""for i in range(9): print(f"\033[{colour}mstep {i} took {t:.2f} s")""")
    assert script_facts(script).measure == "wall"


NANO_GPT = """
import torch
while True:
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        print(f"saving checkpoint at step {iter_num}")
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item()
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt*1000:.2f}ms, mfu {running_mfu*100:.2f}%")
"""
IN_A_FUNCTION = """
import torch
def report(step, loss):
    print(f"[{step + 1}/{steps}] loss {loss:.4f} tok/s {rate:,.0f}")
for epoch in range(9):
    evaluate()
    print(f"[{step}/{steps}] eval loss {loss:.4f}")
    for batch in loader:
        report(step, loss)
"""


@pytest.mark.parametrize(
    ("source", "line", "groups"),
    [
        (NANO_GPT, "iter 250: loss 2.3000, time 12.30ms, mfu 1.20%",
         {"step": "250", "loss": "2.3000", "step_seconds": "12.30"}),
        (IN_A_FUNCTION, "[10/90] loss 2.3000 tok/s 8,123",
         {"step": "10", "loss": "2.3000", "units_per_second": "8,123"}),
        ("for i in r: print(f'Epoch {e} Batch {i}/{n} time {t:.2f}s')", "Epoch 1 Batch 20/90 time 0.50s",
         {"step": "20", "step_seconds": "0.50"}),
        ("for i in r: print(f'batch {args.batch_size} time {t:.2f}s')", "batch 8 time 0.50s", {"step_seconds": "0.50"}),
    ],
    ids=["nanoGPT", "function", "batch", "size"],
)  # fmt: skip
def test_lines_of_training_steps_are_chosen(source: str, line: str, groups: dict[str, str], tmp_path: Path) -> None:
    """Of nanoGPT, the losses of its evaluations were; lines that number a step without the word had one step each."""
    facts = script_facts(written(tmp_path, source))
    assert facts.pattern is not None
    found = re.search(facts.pattern, line)
    assert found is not None and found.groupdict() == groups


OPTIONS = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--seq-len", type=int, default=128)
"""
EPOCHS = (
    OPTIONS
    + """
for epoch in range(args.epochs):
    for batch in loader: train(batch)
    print(f"Epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, time {time.time() - began:.2f}s")
"""
)
STEPS_OF_EPOCHS = EPOCHS.replace("train(batch)", "print(f'tok/s {rate:.0f} loss {loss:.3f}')")
SUMMARY = (
    OPTIONS
    + """
for step in range(90): train(step)
print(f"training took {time.time() - began:.2f} s")
"""
)


@pytest.mark.parametrize(
    ("source", "per", "steps", "said"),
    [
        (OPTIONS, "run", None, "the whole run is timed"),
        (EPOCHS, "epoch", 3, "epochs are read from its lines"),
        (SUMMARY, "run", None, "the whole run is read from a line"),
        (STEPS_OF_EPOCHS, "step", 30, "steps are read from its lines"),
    ],
    ids=["wall", "epoch", "summary", "step"],
)
def test_a_whole_run_or_epoch_is_no_batch(
    source: str, per: str, steps: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Throughput counted the tokens of one batch for all of it: a thousandth of what was trained."""
    assert init_study(written(tmp_path, source), tmp_path / "study.yaml", 2, None) == 0
    assert said in capsys.readouterr().out
    work = load_study(tmp_path / "study.yaml").workload.model_dump()
    assert (work["stop_after"] or {}).get("steps") == steps
    text = (tmp_path / "study.yaml").read_text()
    if per == "step":
        assert work["tokens_per_step"] == "{micro_batch_size} * {sequence_length} * {dp}"
        assert "Throughput counts" not in text
    else:
        assert (work["items_per_step"], work["unit"]) == ("{dp}", per) and work["tokens_per_step"] is None
        assert f"# Throughput counts {per}s, one of each rank." in text


@pytest.mark.parametrize(
    ("told", "unit"),
    [
        ("step(tokens=batch.numel(), loss=loss)", "token"),
        ("rankwise_probe.step(tokens=9)", "token"),
        ("step(9)", "token"),
        ("step(tokens=len(batch), loss=loss)", "sample"),
        ("step(tokens=args.batch_size * args.seq_len)", "token"),
    ],
)
def test_tokens_that_a_script_passes_to_the_probe_are_counted(told: str, unit: str, tmp_path: Path) -> None:
    """A number of batches was stated in the study, which counts in their place."""
    script = written(tmp_path, f"import torch, rankwise_probe\nfor batch in loader: {told}")
    init_study(script, tmp_path / "study.yaml", 2, None)
    work = load_study(tmp_path / "study.yaml").workload.model_dump()
    assert (work["items_per_step"], work["tokens_per_step"], work["unit"]) == (None, None, unit)
    init_study(
        written(tmp_path, "import torch, rankwise_probe\nscheduler.step(9); step()"), tmp_path / "without.yaml", 2, None
    )
    assert load_study(tmp_path / "without.yaml").workload.model_dump()["unit"] == "batch"


@pytest.mark.parametrize(
    ("code", "timed"),
    [
        ("for i in r:\n began = time.time()\n PRINT(time.time() - began)", True),
        ("for i in r:\n t1 = time.time()\n dt = t1 - began\n began = t1\n if i % 10 == 0: PRINT(dt)", True),
        ("for i in r:\n if rank == 0: began = time.time()\n if rank == 0: PRINT(time.time() - began)", True),
        ("for i in r:\n if i % 10 == 0:\n  PRINT((time.time() - began) / 10)\n  began = time.time()", True),
        ("began = time.time()\nfor i in r: PRINT(time.time() - began)", False),
        ("began = time.perf_counter()\nfor i in r:\n took = time.perf_counter() - began\n PRINT(took)", False),
        ("for e in r:\n began = time.time()\n for i in r: PRINT(1000 * (time.time() - began))", False),
        (
            "began = time.time()\nfor i in r:\n if i % 10 == 0:\n  PRINT(time.time() - began)\n  began = time.time()",
            False,
        ),
        ("for i in r:\n if i == 5: began = time.time()\n PRINT(time.time() - began)", False),
    ],
)
def test_a_time_is_that_of_a_step_where_each_starts_its_clock(code: str, timed: bool, tmp_path: Path) -> None:
    """The time since the start of the script, or of the ten steps between two lines, was that of one."""
    source = re.sub(r"PRINT\((.*)\)", r'print(f"step {i} loss {loss:.3f} time {\1:.2f} s")', code)
    facts = script_facts(written(tmp_path, source))
    assert facts.measure == "lines" and facts.pattern is not None
    assert ("step_seconds" in re.compile(facts.pattern).groupindex) == timed


@pytest.mark.parametrize("told", ["it/s {x:.1f}", "steps_per_sec={x}", "iter/s: {x}", "flops_per_sec {x}"])
def test_a_rate_of_steps_is_none_of_tokens(told: str, tmp_path: Path) -> None:
    facts = script_facts(written(tmp_path, f"for i in r: print(f'step {{i}} {told}')"))
    assert facts.pattern is not None and list(re.compile(facts.pattern).groupindex) == ["step"]


def test_modules_that_a_script_imports_are_copied_with_it(tmp_path: Path) -> None:
    """The first run ended with ModuleNotFoundError."""
    folder = tmp_path / "src"
    (folder / "utils").mkdir(parents=True)
    (folder / "model.py").write_text("import layers, torch")
    (folder / "layers.py").write_text("import model")
    (folder / "unused.py").write_text("")
    assert script_facts(written(folder, "from layers import Net")).launcher == "torchrun"  # torch is the model's
    assert script_facts(written(folder, "import unused")).launcher == "none"
    (folder / "data").mkdir()  # no package
    (folder / "utils" / "io.py").write_text("from . import names")
    script = written(folder, "import torch, data\nfrom model import GPT\nimport utils.io as io")
    init_study(script, tmp_path / "study.yaml", 2, None)
    work = load_study(tmp_path / "study.yaml").workload.model_dump()
    assert work["inputs"] == ("src/train.py", "src/layers.py", "src/model.py", "src/utils")
    assert work["command"] == ("src/train.py",)
    (tmp_path / "elsewhere").mkdir()
    init_study(script, tmp_path / "elsewhere" / "study.yaml", 2, None)
    work = load_study(tmp_path / "elsewhere" / "study.yaml").workload.model_dump()
    assert work["inputs"] == tuple(str(folder / name) for name in ("train.py", "layers.py", "model.py", "utils"))
    assert work["command"] == ("train.py",)


@pytest.mark.parametrize("at", ["here", "outside"])
def test_a_script_with_relative_imports_is_started_as_part_of_its_package(at: str, tmp_path: Path) -> None:
    """It ended with `attempted relative import with no known parent package`."""
    package = tmp_path / "mine"
    (package / "cli").mkdir(parents=True)
    for name in ("__init__.py", "model.py", "cli/__init__.py"):
        (package / name).write_text("import helper" if name == "model.py" else "")
    (tmp_path / "helper.py").write_text("")
    script = written(package / "cli", OPTIONS + "from ..model import Net\n")
    (tmp_path / "outside").mkdir()
    study = (tmp_path if at == "here" else tmp_path / "outside") / "study.yaml"
    init_study(script, study, 2, None)
    work = load_study(study).workload.model_dump()
    assert work["command"][:4] == ("python", "-m", "mine.cli.train", "--batch-size")
    names = ("mine", "helper.py")
    assert work["inputs"] == (names if at == "here" else tuple(str(tmp_path / name) for name in names))


SUBPARSERS = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
commands = parser.add_subparsers(dest="command", required=True)
common = argparse.ArgumentParser(add_help=False)
common.add_argument("--block-size", type=int, default=8)
one = commands.add_parser("evaluate")
one.add_argument("checkpoint")
one = commands.add_parser("train", parents=[common])
sizes = one.add_argument_group("sizes")
sizes.add_argument("--batch-size", type=int, default=8)
one.add_argument("--out", required=True)
"""
GROUP = """
import click, torch
@click.group()
@click.option("--seed", default=0)
def cli(seed): ...
@cli.command()
@click.argument("checkpoint")
def evaluate(checkpoint): ...
@cli.command("train")
@click.option("--batch-size", default=8)
@click.option("--out", required=True)
def training(batch_size, out): ...
"""


@pytest.mark.parametrize("source", [SUBPARSERS, GROUP], ids=["argparse", "click"])
def test_of_subcommands_one_is_measured(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command was without any, its options those of all: the first run ended with the script's usage."""
    init_study(written(tmp_path, source), tmp_path / "study.yaml", 2, None)
    said = capsys.readouterr().out
    assert "train.py train takes --seed, --batch-size, --out\n" in said and "add a value of --out to" in said
    work = load_study(tmp_path / "study.yaml").workload.model_dump()
    assert work["command"] == ("train.py", "--seed", "{repeat}", "train", "--batch-size", "{micro_batch_size}")
    text = (tmp_path / "study.yaml").read_text()
    assert "# Of the script's commands (evaluate, train), train is measured.\n" in text
