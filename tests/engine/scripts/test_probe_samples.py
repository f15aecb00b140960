"""The probe in a script's process, and what is read of the file that it writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.scripts import probe_samples

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
