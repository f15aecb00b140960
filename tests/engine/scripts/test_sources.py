"""Sources of figures: the probe's file, printed lines, TensorBoard's event files, JSON; each against the real thing."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from configs.workloads.script import ScriptWorkload
from configs.workloads.script_figures import PRESETS, JsonFigures, LinePattern
from engine.scripts import event_files, json_output, probe_samples
from engine.scripts.line_figures import LineReader, number
from engine.scripts.outputs import Line
from engine.scripts.series import NoFiguresError, missing_figures
from engine.scripts.signs import rank_end

PROBE = Path(probe_samples.__file__).parents[1] / "probe"


def with_probe(folder: Path, code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(PROBE), "RANKWISE_PROBE": str(folder), "RANK": "0", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=600)


def test_what_the_probe_writes_is_what_the_agent_reads(tmp_path: Path) -> None:
    code = """
import time
from rankwise_probe import step, mark
for n in range(9000):
    step(tokens=n, loss=None if n == 5 else float("nan") if n == 6 else n / 2)
with step(tokens=7) as this:
    mark("data_seconds", 0.25)
    time.sleep(0.02)
    this.loss = 3
time.sleep(0.05)
with step():
    pass
"""
    assert with_probe(tmp_path, code).returncode == 0
    series = probe_samples.series_of_probe(tmp_path, 0)
    assert len(series) == probe_samples.steps_so_far(tmp_path, 0) == 9002
    assert series.seconds[0] is None and series.units[:3] == [0, 1, 2]
    assert series.losses[4] == 2 and series.losses[5] is None
    assert series.bad_loss() is not None and series.bad_loss()[0] == 7  # type: ignore[index]
    assert series.units[-2:] == [7, None] and series.losses[-2:] == [3, None]
    block, after = series.seconds[-2:]
    assert block is not None and block >= 0.02 and after is not None and after < 0.05
    assert series.own_figures() == {"mark_data_seconds": 0.25}
    assert probe_samples.ended_in_order(tmp_path, 0)


def test_blocks_take_no_more_pages_than_calls(tmp_path: Path) -> None:
    code = "from rankwise_probe import step\nfor _ in range(2 * 8192):\n    with step(): pass"
    assert with_probe(tmp_path, code).returncode == 0
    (path,) = tmp_path.glob("*.samples")
    assert path.stat().st_size == probe_samples.HEADER + 3 * probe_samples.PAGE
    series = probe_samples.series_of_probe(tmp_path, 0)
    assert len(series) == 2 * 8192 and None not in series.seconds


FAKE_CUDA = """
import struct, sys, types

class Event:
    now, done = 0.0, True                       # the device's clock in seconds; whether its work has passed
    def __init__(self, enable_timing=False):
        self.timed = enable_timing
    def record(self):
        self.at = Event.now
    def synchronize(self):
        Event.done = True
    def query(self):
        return Event.done
    def elapsed_time(self, other):              # milliseconds in float32, as cudaEventElapsedTime has it
        assert self.timed and other.timed
        return struct.unpack("<f", struct.pack("<f", (other.at - self.at) * 1000))[0]

class Scalar:
    def __init__(self, memory, is_cuda=True):
        self.memory, self.is_cuda = memory, is_cuda
    def numel(self):
        return len(self.memory)
    def detach(self):
        return Scalar(self.memory, self.is_cuda)
    def to(self, device, non_blocking):         # into pinned memory, in the order of the stream
        assert device == "cpu" and non_blocking
        return Scalar(list(self.memory), is_cuda=False)
    def __float__(self):
        assert len(self.memory) == 1
        if self.is_cuda:
            sys.stderr.write("waits for the stream")
        elif not Event.done:
            sys.stderr.write("reads before the copy has passed")
        return self.memory[0]

cuda = types.SimpleNamespace(Event=Event, is_initialized=lambda: True, is_current_stream_capturing=lambda: False)
cuda.current_stream = lambda: types.SimpleNamespace(synchronize=lambda: None)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
from rankwise_probe import step
"""
"""What the probe uses of torch.cuda, on a machine without a GPU."""


def test_steps_of_a_script_that_has_run_for_hours_on_a_gpu_keep_their_precision(tmp_path: Path) -> None:
    code = """
step()
Event.now += 10 * 3600.0
for _ in range(100):
    step()
    Event.now += 0.0107
"""
    done = with_probe(tmp_path, FAKE_CUDA + code)
    assert done.returncode == 0, done.stderr
    series = probe_samples.series_of_probe(tmp_path, 0)
    assert series.device_clock and series.seconds[1] == pytest.approx(36_000)
    assert series.seconds[2:] == pytest.approx([0.0107] * 99, abs=1e-6)


def test_values_on_a_gpu_are_those_of_their_step_and_nothing_waits_for_them(tmp_path: Path) -> None:
    code = """
from rankwise_probe import mark
Event.done, memory = False, [0.0]               # the device is behind, and its memory is used again for each step
for value in (3.0, 2.0, 1.0):
    memory[0] = value
    mark("norm", Scalar(memory))
    step(tokens=Scalar([value * 10]), loss=Scalar(memory))
with step(tokens=Scalar([7.0])) as this:
    this.loss = Scalar(memory)
step(loss=Scalar([1.0, 2.0]))
memory[0] = -1.0
"""
    done = with_probe(tmp_path, FAKE_CUDA + code)
    assert done.returncode == 0 and done.stderr == ""
    series = probe_samples.series_of_probe(tmp_path, 0)
    assert series.losses == [3, 2, 1, 1, None] and series.units == [30, 20, 10, 7, None]
    assert series.own_figures() == {"mark_norm": 2.0}
    assert series.device_clock and None not in series.seconds[1:]


def test_steps_that_the_gpu_has_not_ended_when_a_script_is_killed_are_none(tmp_path: Path) -> None:
    code = """
import os, signal
for place in range(15):
    Event.now += 1.0
    Event.done = place < 10
    step(tokens=Scalar([4.0]), loss=Scalar([1.0]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert with_probe(tmp_path, FAKE_CUDA + code).returncode == -9
    series = probe_samples.series_of_probe(tmp_path, 0)
    assert len(series) == probe_samples.steps_so_far(tmp_path, 0) == 10
    assert probe_samples.steps_called(tmp_path, 0) == 15
    assert series.seconds[1:] == pytest.approx([1.0] * 9) and series.units == [4] * 10 and series.losses == [1] * 10


def test_what_is_kept_of_a_gpu_is_bounded(tmp_path: Path) -> None:
    code = """
import gc
Event.done = False
for value in range(500):
    step(loss=Scalar([float(value)]))
    Event.done = False
print(sum(isinstance(one, Scalar) for one in gc.get_objects()) < 100)
"""
    done = with_probe(tmp_path, FAKE_CUDA + code)
    assert done.stdout == "True\n", done.stderr
    assert probe_samples.series_of_probe(tmp_path, 0).losses == list(range(500))


@pytest.mark.parametrize("start", ["from rankwise_probe import step", FAKE_CUDA])
def test_a_loss_that_cannot_be_read_is_unknown_and_no_nan(start: str, tmp_path: Path) -> None:
    code = "\nstep(loss=[1.0, 2.0])\nstep(loss=object())\nstep(loss='0.5')\nwith step() as this:\n    this.loss = {}\n"
    assert with_probe(tmp_path, start + code).returncode == 0
    series = probe_samples.series_of_probe(tmp_path, 0)
    assert series.losses == [None, None, 0.5, None] and series.bad_loss() is None


def test_marks_of_long_names_and_of_numbers_keep_every_value(tmp_path: Path) -> None:
    code = """
from rankwise_probe import step, mark
for value in (9.0, 1.0, 2.0):
    mark("x" * 70, value)
    mark(3, value)
    step()
"""
    assert with_probe(tmp_path, code).returncode == 0
    found = probe_samples.series_of_probe(tmp_path, 0).own_figures()
    assert list(found.values()) == [2.0, 2.0] and "mark_3" in found


def test_samples_survive_a_kill(tmp_path: Path) -> None:
    code = "import os, signal\nfrom rankwise_probe import step\nstep(); step()\nos.kill(os.getpid(), signal.SIGKILL)"
    assert with_probe(tmp_path, code).returncode == -9
    assert len(probe_samples.series_of_probe(tmp_path, 0)) == 2
    assert not probe_samples.ended_in_order(tmp_path, 0)


def test_the_probe_does_nothing_by_itself_and_breaks_nothing(tmp_path: Path) -> None:
    code = (
        "from rankwise_probe import step, mark\nwith step(tokens=1) as s: s.loss = 1\nmark('a', 1)\nstep(loss=object())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKWISE")}
    done = subprocess.run([sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(PROBE)}, timeout=600)
    assert done.returncode == 0
    lost = with_probe(tmp_path / "gone", code)
    assert lost.returncode == 0 and lost.stderr.count("rankwise_probe: no samples are kept") == 1


def test_nothing_of_a_step_outlives_it_where_nothing_is_measured(tmp_path: Path) -> None:
    """One object for all steps kept the last loss, and with its graph the weights, for as long as the process lived."""
    code = (
        "import weakref\nfrom rankwise_probe import step\nclass Loss: pass\n"
        "with step(tokens=2) as this:\n    this.tokens += 1\n    this.loss = Loss()\n"
        "loss = weakref.ref(this.loss)\nassert this.loss is loss() and this.tokens == 3\n"
        "with step() as this: pass\nassert loss() is None"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKWISE")}
    environment["PYTHONPATH"] = str(PROBE)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_trainer_is_instrumented_beside_finders_of_an_old_kind(tmp_path: Path) -> None:
    package = tmp_path / "library" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class TrainerCallback: pass\n")
    (package / "trainer.py").write_text(
        "class Trainer:\n    def __init__(self): self.added = []\n"
        "    def add_callback(self, callback): self.added.append(type(callback).__name__)\n"
    )
    code = (
        "import sys, types\n"
        "old = types.SimpleNamespace(find_module=lambda name, path=None: None)\n"  # of before Python 3.4
        "sys.meta_path.insert(0, old)\n"
        "from rankwise_probe.callbacks import watch; watch('hf_trainer')\n"
        "from transformers.trainer import Trainer; print(Trainer().added)"
    )
    done = with_probe(tmp_path, code, PYTHONPATH=f"{PROBE}:{tmp_path / 'library'}", PYTHONWARNINGS="ignore")
    assert done.stdout == "['RankwiseCallback']\n", done.stderr


def test_a_loss_of_lightning_is_whole_where_gradients_are_accumulated(tmp_path: Path) -> None:
    """Lightning gives callbacks the loss divided by accumulate_grad_batches."""
    code = (
        "from types import SimpleNamespace as Of\n"
        "from rankwise_probe.callbacks import _LightningHooks\n"
        "hooks = _LightningHooks()\n"
        "for batches in (1, 4):\n"
        "    for batch in range(1, 9):\n"
        "        trainer = Of(global_step=8 * (batches == 4) + batch // batches, accumulate_grad_batches=batches)\n"
        "        hooks.on_train_batch_end(trainer, None, {'loss': 2.5 / batches}, None, batch)\n"
        "trainer.global_step += 1\n"
        "hooks.on_train_batch_end(trainer, None, {}, None, 9)\n"
    )
    done = with_probe(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert probe_samples.series_of_probe(tmp_path, 0).losses == [2.5] * 10 + [None]


def test_garbage_beside_the_samples_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "rank_0.1.samples").write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "rank_0.2.samples")
    assert len(probe_samples.series_of_probe(tmp_path, 0)) == 0


def seen(pattern: LinePattern, lines: list[str], ranks: int = 2, rank: int = 0) -> LineReader:
    reader = LineReader(pattern, ranks)
    for place, text in enumerate(lines):
        reader.see(Line(rank, False, text, float(place)))
    return reader


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8,123", 8123),
        ("-1,234,567.5", -1234567.5),
        ("8,", 8),
        ("8.1k", 8100),
        ("3e-4", 3e-4),
        (" -1 ", -1),
        ("2M", 2e6),
        ("inf", float("inf")),
    ],
)
def test_numbers_of_lines(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["0,52", "1,5", "0,512", "12,3456", "1,5e3"])
def test_a_decimal_comma_is_no_thousands_separator(text: str) -> None:
    """A step of 0,52 s was one of 52 s."""
    with pytest.raises(ValueError, match="not a number"):
        number(text)


@pytest.mark.parametrize("part", ["1", "1_", " ", ",111"])
def test_a_long_line_that_is_no_number_takes_no_time_to_speak_of(part: str) -> None:
    """Hours, where two parts of a number take the same characters."""
    with pytest.raises(ValueError, match="not a number"):
        number(f"1{part * (1 << 20)}x")


def test_lines_with_times_rates_and_own_figures() -> None:
    pattern = LinePattern(
        pattern=r"step (?P<step>\S+) loss (?P<loss>\S+) (?P<step_seconds>\S+) ms (?P<tflops>\S+) TF",
        units={"step_seconds": "ms"},
    )
    reader = seen(
        pattern, ["step 1 loss 2.5 20 ms 3 TF", "noise", "step 2 loss x 20 ms 3 TF", "step 3 loss 2 30 ms 5 TF"]
    )
    assert reader.series.seconds == pytest.approx([0.02, 0.03, 0.03])  # line 3 stands for the broken step too
    assert (reader.seen, reader.broken, reader.steps) == (4, 1, 3)
    assert reader.series.own_figures() == {"tflops": 4}


def test_steps_between_lines_share_their_time() -> None:
    reader = LineReader(LinePattern(pattern=r"it (?P<step>\d+)"), 1)
    for step, at in ((10, 1.0), (20, 2.0), (30, 4.0), (40, 4.0), (50, 5.0)):
        reader.see(Line(0, False, f"it {step}", at))
    assert reader.series.seconds[1:11] == pytest.approx([0.1] * 10)
    assert reader.series.seconds[11:31] == pytest.approx([0.1] * 20)  # two lines that were read at once
    assert reader.series.seconds[31:] == pytest.approx([0.1] * 10)


def test_lines_that_were_read_at_once_share_what_their_rates_made_of_the_time() -> None:
    reader = LineReader(LinePattern(pattern=r"it (?P<step>\d+) (?P<units_per_second>\S+)"), 1)
    for step, at in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 3.0), (6, 3.0)):
        reader.see(Line(0, False, f"it {step} 100", at))
    assert reader.series.seconds[1:] == pytest.approx([1.0] + [0.25] * 4)
    assert reader.series.units[1:] == pytest.approx([100.0] + [25.0] * 4)  # 100 a second, however they were read


def test_lines_that_come_with_the_first_one_have_no_time() -> None:
    reader = LineReader(LinePattern(pattern=r"it (?P<step>\d+)"), 1)
    for step, at in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 3.0), (5, 3.0)):
        reader.see(Line(0, False, f"it {step}", at))
    assert reader.series.seconds == [None, None, None, 1.0, 1.0]


@pytest.mark.parametrize("rate", ["inf", "nan", "-3"])
def test_a_rate_that_is_no_number_is_a_broken_line(rate: str) -> None:
    pattern = LinePattern(pattern=r"it (?P<step>\d+) (?P<units_per_second>\S+) (?P<step_seconds>\S+)")
    reader = seen(pattern, [f"it 1 {rate} 0.5", "it 2 10 0.5"])
    assert reader.broken == 1 and reader.series.units == [5.0]


def test_a_script_that_resumes_is_counted_from_its_first_step() -> None:
    """It was ended after its first line, which showed more steps than stop_after asks for."""
    reader = seen(LinePattern(pattern=r"it (?P<step>\d+)"), ["it 10000", "it 10001", "it 10002"])
    assert (reader.steps, len(reader.series), reader.last_step) == (3, 3, 10002)


def test_lines_that_match_and_cannot_be_read_are_told_from_those_that_do_not_match() -> None:
    pattern = LinePattern(pattern=r"took (?P<step_seconds>\S+)", units={"step_seconds": "ms"})
    reader = seen(pattern, ["begin", "took 12.5ms", "took 12.7ms"])
    work = ScriptWorkload(command=("t.py",), measure="lines", lines=pattern)
    assert missing_figures(work, reader.seen, reader.broken, reader.why_broken) == (
        "workload.lines.pattern matched 2 of 3 lines, none with figures that can be read (step_seconds: not a number: "
        "'12.7ms'). Let each group match a number alone"
    )
    assert "matched none of 3 lines" in missing_figures(work, 3)


def test_lines_of_other_ranks_do_not_count() -> None:
    assert seen(LinePattern(pattern=r"(?P<loss>\d)", rank="last"), ["1"], ranks=4, rank=0).seen == 0
    assert seen(LinePattern(pattern=r"(?P<loss>\d)", rank="last"), ["1"], ranks=4, rank=3).seen == 1


TORCHTITAN = (
    "[rank0]:[titan] 2025-01-01 00:00:00,000 - root - INFO - step:  1  loss: 12.2721  grad_norm:  3.1234  "
    "memory: 47.12GiB(49.60%)  tps: 5,762  tflops: 299.37  mfu: 30.27%"
)
MEGATRON = (
    " [2025-01-01 00:00:00.000000] iteration        5/     100 | consumed samples:           40 | "
    "elapsed time per iteration (ms): 812.5 | learning rate: 1.500000E-04 | global batch size:     8 | "
    "lm loss: 1.054321E+01 | loss scale: 1.0 | grad norm: 2.345 |"
)
DEEPSPEED = (
    "[2026-11-24 09:20:25,172] [INFO] [timer.py:264:stop] epoch=0/micro_step=4/global_step=4, "
    "RunningAvgSamplesPerSec=4919.2833895323265, CurrSamplesPerSec=5064.74565280458, MemAllocated=0.44GB, "
    "MaxMemAllocated=0.44GB"
)


def test_presets_read_the_lines_of_their_programs() -> None:
    titan = seen(PRESETS["torchtitan"], [TORCHTITAN, TORCHTITAN.replace("step:  1", "step: 11")])
    assert titan.broken == 0 and titan.series.losses[0] == 12.2721
    assert titan.series.units[1] == pytest.approx(5762 * 2 * 0.1)  # per device, on two; ten steps in a second
    assert seen(PRESETS["torchtitan"], ["validate step:  1  loss:  1.0  memory: 1.00GiB(1.00%)  tps: 5"]).steps == 0
    megatron = seen(PRESETS["megatron"], [MEGATRON], ranks=2, rank=1)
    assert megatron.series.seconds == [0.8125] and megatron.series.losses == [10.54321]
    deepspeed = seen(PRESETS["deepspeed"], [DEEPSPEED, DEEPSPEED.replace("global_step=4", "global_step=6")])
    assert deepspeed.series.seconds[1:] == [0.5, 0.5]
    assert deepspeed.series.own_figures() == {"samples_per_second": pytest.approx(5064.74565)}


@pytest.mark.slow
def test_event_files_of_torchs_own_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = """
import sys
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
for step in range(0, 50, 10):
    writer.add_scalar("train/loss", 5.0 - step / 10, step, walltime=1000.0 + step * 0.5)
    writer.add_scalar("lr", 0.1, step, walltime=1.0)
    writer.add_scalar("new", step, step, walltime=7.0 + step, new_style=True)
writer.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True, timeout=600)
    assert event_files.scalars(tmp_path, "train/loss") == [
        (step, 1000 + step / 2, 5 - step / 10) for step in range(0, 50, 10)
    ]
    assert [value for _, _, value in event_files.scalars(tmp_path, "new")] == [0, 10, 20, 30, 40]
    series = event_files.series_of_events(tmp_path, "train/loss", None)
    assert series.seconds == [0.5] * 40 and series.losses[0] == 4.0
    # Of another run, such as those that came with the inputs.
    earlier = event_files.LastStep(tmp_path, "train/loss")
    assert earlier.look() == len(event_files.series_of_events(tmp_path, "train/loss", None, earlier.earlier)) == 0
    whole = next(tmp_path.glob("*tfevents*"))
    growing = tmp_path / "growing"
    growing.mkdir()
    last, seen, content = event_files.LastStep(growing, "train/loss"), [], whole.read_bytes()
    for place in range(0, len(content), 7):
        with (growing / "events.out.tfevents.1").open("ab") as file:
            file.write(content[place : place + 7])
        seen.append(last.look())
    assert seen == sorted(seen) and set(seen) == {0, 10, 20, 30, 40}
    shutil.rmtree(growing)
    # Damaged, endless and foreign files are no scalars.
    (tmp_path / "cut.tfevents.1").write_bytes(whole.read_bytes()[:100])
    (tmp_path / "junk.tfevents.2").write_bytes(b"\xff" * 5000)
    os.mkfifo(tmp_path / "pipe.tfevents.3")
    assert len(event_files.scalars(tmp_path, "train/loss")) == 5


def test_scalars_beside_gigabytes_of_videos(tmp_path: Path) -> None:
    """A file of more than 512 MiB had no steps, and one with a large event none behind it."""

    def scalar(step: int) -> bytes:
        value = b"\x0a\x04loss" + b"\x15" + struct.pack("<f", 5.0 - step)
        summary = b"\x0a" + bytes([len(value)]) + value
        event = b"\x09" + struct.pack("<d", 1000.0 + step) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)])
        event += summary
        return struct.pack("<Q", len(event)) + b"\0" * 4 + event + b"\0" * 4

    path, last = tmp_path / "events.out.tfevents.1", event_files.LastStep(tmp_path, "loss")
    with path.open("wb") as file:
        file.write(scalar(1))
        for step in (2, 3):
            file.write(struct.pack("<Q", 700 << 20) + b"\0" * 4)
            file.seek((700 << 20) + 4, os.SEEK_CUR)  # a hole: it takes no room on the disk
            file.write(scalar(step))
    assert path.stat().st_size > 1 << 30
    assert event_files.scalars(tmp_path, "loss") == [(step, 1000.0 + step, 5.0 - step) for step in (1, 2, 3)]
    assert last.look() == 2


@pytest.mark.parametrize("told", ['"12.5"', "-1", "true"])
@pytest.mark.parametrize("name", ["step_seconds", "units_per_second"])
def test_a_time_or_a_rate_that_is_no_number_fails_instead_of_being_replaced(name: str, told: str) -> None:
    asked = JsonFigures(figures={name: "took"})
    with pytest.raises(NoFiguresError, match=f"workload.json_figures.figures.{name}: expected a number"):
        json_output.series_of_json(asked, Path(), f'{{"took": {told}}}'.encode(), 60.0)


def test_a_time_of_zero_is_not_replaced_by_that_of_the_process() -> None:
    with pytest.raises(NoFiguresError, match="step_seconds: expected a number above 0, got 0"):
        json_output.series_of_json(JsonFigures(figures={"step_seconds": "took"}), Path(), b'{"took": 0}', 60.0)


def test_a_rank_s_rate_in_json_is_that_of_all_ranks_together() -> None:
    asked = JsonFigures(figures={"step_seconds": "took", "rank_units_per_second": "tps"})
    work = ScriptWorkload(command=("train.py",), measure="json", json_figures=asked)
    series = json_output.series_of_json(asked, Path(), b'{"took": 2.0, "tps": 50}', 60.0, ranks=4)
    assert work.counted == "token" and series.units == [400.0] and series.figures == {"rank_units_per_second": 50}


def test_names_of_json_may_have_dots(tmp_path: Path) -> None:
    """Of fio's percentiles it said that there is no figure."""
    told = b'{"jobs": [{"clat_ns": {"percentile": {"99.000000": 12, "99.900000": 34}}}]}'
    asked = JsonFigures(figures={"p99": "jobs.0.clat_ns.percentile.99.000000"})
    series = json_output.series_of_json(asked, tmp_path, told, 1.0)
    assert series.figures == {"p99": 12}
    with pytest.raises(NoFiguresError, match=r"no figure at jobs.0.clat_ns.percentile.98.0"):
        json_output.series_of_json(JsonFigures(figures={"p98": "jobs.0.clat_ns.percentile.98.0"}), tmp_path, told, 1.0)


def test_json_of_a_file_and_of_standard_output(tmp_path: Path) -> None:
    asked = JsonFigures(figures={"units_per_second": "jobs.0.read.bw", "version": "v"})
    document = {"v": "fio-3", "jobs": [{"read": {"bw": 50.0}}]}
    series = json_output.series_of_json(
        asked, tmp_path, b'log\n{"v": 0}\n' + json.dumps(document, indent=1).encode(), 4.0
    )
    assert (series.seconds, series.units) == ([4.0], [200.0])
    assert series.own_figures() == {"units_per_second": 50.0, "version": "fio-3"}
    with pytest.raises(
        NoFiguresError, match=r"workload.json_figures.figures.units_per_second: no figure at jobs.0.read.bw"
    ):
        json_output.series_of_json(asked, tmp_path, b'{"v": 1}', 1.0)
    with pytest.raises(NoFiguresError, match="no JSON document"):
        json_output.series_of_json(asked, tmp_path, b"[[[[ {\n{", 1.0)
    in_file = asked.model_copy(update={"file": "out.json"})
    (tmp_path / "out.json").write_text(json.dumps(document))
    before = json_output.state_of_file(in_file, tmp_path)
    with pytest.raises(NoFiguresError, match=r"out\.json was there before the script, which did not write it"):
        json_output.series_of_json(in_file, tmp_path, b"", 4.0, before)
    (tmp_path / "out.json").write_text(json.dumps(document) + "\n")
    assert json_output.series_of_json(in_file, tmp_path, b"", 4.0, before).units == [200.0]
    (tmp_path / "out.json").unlink()
    os.mkfifo(tmp_path / "out.json")
    with pytest.raises(NoFiguresError, match="named pipe"):
        json_output.series_of_json(in_file, tmp_path, b"", 1.0)


TRACEBACK = b"Traceback (most recent call last):\n  File\n"
OUT = TRACEBACK + b"torch.OutOfMemoryError: CUDA out of memory. Tried\n"
LINK = b"\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("code", "tail", "kind"),
    [
        (0, b"CUDA out of memory", None),
        # What a script caught and went on from is not its end; what its end came from is.
        (1, OUT + b"batch 8 instead of 16\n" + TRACEBACK + b"KeyError: 'loss'\n", "KeyError"),
        (1, b"CUDA out of memory, batch 8 instead of 16\n" + TRACEBACK + b"KeyError: 'loss'\n", "KeyError"),
        (1, OUT + LINK + TRACEBACK + b"RuntimeError: no step\n", "OutOfMemoryError"),
        (1, OUT + LINK + TRACEBACK + b"A: b\n" + LINK + TRACEBACK + b"RuntimeError: no step\n", "OutOfMemoryError"),
        (1, OUT + b"Exception ignored in: <function f>\n" + TRACEBACK + b"TypeError: x\n", "OutOfMemoryError"),
        (1, b"Exception in thread Thread-1:\n" + OUT + TRACEBACK + b"RuntimeError: it ended\n", "OutOfMemoryError"),
        (1, TRACEBACK + b"DistBackendError: NCCL error\nCuda failure 2 'out of memory'\n", "OutOfMemoryError"),
        (
            1,
            b"Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried",
            "OutOfMemoryError",
        ),
        (1, b"jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory", "OutOfMemoryError"),
        (1, b"Traceback (most recent call last):\n  File\nValueError: bad\n", "ValueError"),
        (
            1,
            b"Traceback (most recent call last):\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]",
            "PeerLost",
        ),
        (-15, b"", "PeerLost"),
        (-9, b"", "SIGKILL"),
        (-11, b"", "SIGSEGV"),
        (7, b"usage: x", "ExitCode"),
        (1, b"\xff\xfe\x00", "ExitCode"),
    ],
)
def test_ends_of_ranks(code: int, tail: bytes, kind: str | None) -> None:
    found = rank_end(code, tail)
    assert (found and found.kind) == kind
    if found is not None and kind == "OutOfMemoryError":
        assert re.search("(?i)out of memory", found.message), found.message


def test_secrets_in_a_scripts_last_words_are_hidden() -> None:
    found = rank_end(
        1, b"Traceback (most recent call last):\nValueError: https://user:hunter22@host failed token=abcdefgh"
    )
    assert found is not None and "hunter22" not in found.message and "abcdefgh" not in found.message


def test_a_call_of_the_probe_is_cheap(tmp_path: Path) -> None:
    """p99 is measured in docs/measurements/script.md; here only that a call is no millisecond."""
    code = """
import time
from rankwise_probe import step
began = time.process_time()
for _ in range(20000):
    step(tokens=1, loss=1.0)
print((time.process_time() - began) / 20000)
"""
    assert float(with_probe(tmp_path, code).stdout) < 1e-3
