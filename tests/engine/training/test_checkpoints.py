"""Checkpoints: what resumes is what was; torn ones are passed over; a disk that is full costs no training."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.training.checkpoints.export import export, main
from engine.training.checkpoints.files import newest_whole, steps_in, unfinished_folder
from engine.training.checkpoints.measurement import save
from engine.training.checkpoints.saving import Saver, load
from engine.training.checkpoints.staging import shared_out
from tests.support.rank_pool import RankPool
from tests.support.training.checkpointed_runs import (
    Training,
    checkpoints_of,
    load_by_hand,
    manifest_of,
    save_by_hand,
    train,
    train_on_a_small_disk,
    train_where_one_sees_nothing,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32_NOISE = 2e-6
"""Relative. Sums over 2 ranks instead of 1 round elsewhere; in 6 steps at 1e-2 the losses differ by less than this."""


def run(pool: RankPool, training: Training) -> dict[str, Any]:
    """What rank 0 gives; all ranks tell the same history."""
    if training.ranks == 1:
        return train(0, training)
    found: list[dict[str, Any]] = pool.run(train, training)
    assert [one["losses"] for one in found] == [found[0]["losses"]] * training.ranks
    return found[0]


@pytest.mark.parametrize(
    ("strategy", "ranks", "dtype"),
    [("none", 1, "float32"), ("ddp", 2, "float32"), ("fsdp", 2, "float32"), ("ddp", 2, "float16")],
)
def test_the_same_ranks_go_on_bit_by_bit(pool: RankPool, tmp_path: Path, strategy: str, ranks: int, dtype: str) -> None:
    whole = run(pool, Training(str(tmp_path / "whole"), strategy, ranks, 7, dtype))
    cut = Training(str(tmp_path / "cut"), strategy, ranks, 5, dtype)
    assert run(pool, cut)["figures"]["resumed_from_step"] is None
    found = run(pool, replace(cut, stop_after=7))
    assert found["figures"]["resumed_from_step"] == 4
    assert (found["losses"], found["norms"]) == (whole["losses"], whole["norms"])
    assert len(set(whole["losses"])) == 7
    for name, weight in whole["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], weight, err_msg=name)


@pytest.mark.nightly
def test_four_ranks_of_ddp_go_on_bit_by_bit(tmp_path: Path) -> None:
    """Where a gradient lies in DDP's buckets, which are arranged anew after its first step, decides how sums round."""
    with RankPool(4) as four:
        whole = run(four, Training(str(tmp_path / "whole"), "ddp", 4, 9))
        cut = Training(str(tmp_path / "cut"), "ddp", 4, 5)
        run(four, cut)
        found = run(four, replace(cut, stop_after=9))
    assert found["figures"]["resumed_from_step"] == 4
    assert (found["losses"], found["norms"]) == (whole["losses"], whole["norms"])


@pytest.mark.slow
def test_a_rank_that_sees_no_checkpoint_ends_the_others_at_once(tmp_path: Path) -> None:
    """Before the discarded step of DDP, in which more than two ranks would wait for its gradients."""
    training = Training(str(tmp_path), "ddp", 3, 2, work={"global_batch_size": 6})
    with RankPool(3) as three:
        three.run(train, training)
        said = three.run(train_where_one_sees_nothing, training, 1)
    assert len(set(said)) == 1 and "No such file" in said[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six steps of one process."""
    return train(0, Training(str(tmp_path_factory.mktemp("alone")), "none", 1, 6))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("none", 1), ("ddp", 2)),
        (("none", 1), ("fsdp", 2)),
        (("ddp", 2), ("none", 1)),
        (("fsdp", 2), ("none", 1)),
        (("ddp", 2), ("fsdp", 2)),
        (("fsdp", 2), ("ddp", 2)),
    ],
)
def test_other_ranks_and_strategies_go_on_within_rounding(
    pool: RankPool, alone: dict[str, Any], tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    before, after = Training(str(tmp_path / "a"), *first, 4), Training(str(tmp_path / "b"), *second, 6)
    run(pool, before)
    shutil.copytree(checkpoints_of(before), checkpoints_of(after))
    found = run(pool, after)
    assert found["figures"]["resumed_from_step"] == 4
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=FLOAT32_NOISE)
    np.testing.assert_allclose(found["norms"], alone["norms"], rtol=10 * FLOAT32_NOISE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run of one process with whole checkpoints of its steps 2 and 4."""
    training = Training(str(tmp_path_factory.mktemp("trained")), "none", 1, 4)
    train(0, training)
    assert steps_in(checkpoints_of(training)) == [2, 4]
    return training


def _copy(trained: Training, folder: Path) -> Training:
    shutil.copytree(trained.folder, folder)
    return replace(trained, folder=str(folder))


def _spoil(checkpoint: Path, how: str) -> str:
    tensors = next(checkpoint.glob("*.distcp"))
    if how == "missing":
        tensors.unlink()
    elif how == "short":
        os.truncate(tensors, tensors.stat().st_size - 1)
    elif how == "no manifest":
        (checkpoint / "checkpoint.json").unlink()
    else:
        path = checkpoint / "checkpoint.json"
        path.write_text(path.read_text().replace('"step": 4', '"step": 5'))
    return {"missing": "No such file", "short": "bytes instead of", "no manifest": "cannot be read"}.get(how, "changed")


@pytest.mark.parametrize("how", ["missing", "short", "no manifest", "other manifest"])
def test_a_torn_checkpoint_is_passed_over_and_told(
    trained: Training, tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    training = _copy(trained, tmp_path / "copy")
    folder = checkpoints_of(training)
    words = _spoil(folder / "step_00000004", how)
    found = train(0, replace(training, stop_after=5))
    assert found["figures"]["resumed_from_step"] == 2
    assert found["figures"]["checkpoints_torn"] == 1
    said = capfd.readouterr().err
    assert "torn" in said and "step_00000004" in said and words in said
    assert newest_whole(folder).torn == (), "what was torn was written anew"
    assert found["losses"][:4] == train(0, trained)["losses"]


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_changed_byte_is_found(trained: Training, data: st.DataObject) -> None:
    folder = checkpoints_of(trained)
    files = sorted((folder / "step_00000004").iterdir())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
    assert newest_whole(folder).torn == ()
    try:
        path.write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
        found = newest_whole(folder)
        assert found.folder == folder / "step_00000002" and len(found.torn) == 1
    finally:
        path.write_bytes(content)


def test_without_a_whole_one_it_begins_anew(trained: Training, tmp_path: Path) -> None:
    training = _copy(trained, tmp_path / "copy")
    for step in (2, 4):
        _spoil(checkpoints_of(training) / f"step_{step:08d}", "short")
    found = train(0, training)
    assert (found["figures"]["resumed_from_step"], found["figures"]["checkpoints_torn"]) == (None, 2)
    assert found["figures"]["checkpoints_written"] == 2


def test_the_last_ones_are_kept_and_what_was_begun_goes(trained: Training, tmp_path: Path) -> None:
    training = _copy(trained, tmp_path / "copy")
    folder = checkpoints_of(training)
    for step in (6, 7):  # one that is written again, and one that never is
        left = folder / f".step_{step:08d}.unfinished"
        left.mkdir()
        (left / "__0_0.distcp").write_bytes(b"half")
    train(0, replace(training, stop_after=9))
    assert steps_in(folder) == [6, 8]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    three = Training(str(tmp_path / "three"), "none", 1, 9, work={"checkpoints_kept": 3, "checkpoint_mode": "sync"})
    train(0, three)
    assert steps_in(checkpoints_of(three)) == [4, 6, 8]


@pytest.mark.parametrize("short_rank", [0, 1])
def test_a_full_disk_costs_the_checkpoint_and_no_training(pool: RankPool, tmp_path: Path, short_rank: int) -> None:
    training = Training(str(tmp_path), "ddp", 2, 2)
    pool.run(train, training)
    found = pool.run(train_on_a_small_disk, replace(training, stop_after=5), short_rank)
    for one in found:
        assert (one["figures"]["checkpoint_failures"], one["figures"]["checkpoints_written"]) == (1, 0)
        assert len(one["losses"]) == 5
    assert steps_in(checkpoints_of(training)) == [2]
    assert not list(checkpoints_of(training).glob(".*"))
    after = pool.run(train, replace(training, stop_after=5))
    assert after[0]["figures"]["resumed_from_step"] == 2
    assert steps_in(checkpoints_of(training)) == [2, 4]


def test_a_checkpoint_that_could_not_be_written_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for mode in ("async", "sync"):
        training = Training(str(tmp_path), "none", 1, 3, work={"checkpoint_mode": mode})
        assert train_on_a_small_disk(0, training, 0)["figures"]["checkpoint_failures"] == 1
        said = capfd.readouterr().err
        assert "checkpoint of step 2 could not be written, the training goes on" in said and "File too large" in said


def test_another_run_is_refused_by_name(trained: Training, tmp_path: Path) -> None:
    training = _copy(trained, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"measuring\.seed: 1 does not go on from .*step_00000004.*made with 0"):
        train(0, replace(training, seed=1))
    other = replace(training, work={"global_batch_size": 8})
    shutil.copytree(checkpoints_of(training), checkpoints_of(other))
    with pytest.raises(ValueError, match=r"workload\.global_batch_size: 8"):
        train(0, other)


def test_what_is_written_behind_is_what_was(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    state = {"model": {"a": torch.arange(4.0), "b": torch.tensor(7)}, "rates": {"a": [0.1, 0.2]}}
    saver.save(lambda: state, 1, {"seen": 0.1})
    state["model"]["a"].fill_(-1)  # the training goes on meanwhile
    state["rates"]["a"][0] = 5  # type: ignore[index]
    assert saver.save(lambda: state, 2, {}) > 0
    saver.wait()
    assert saver.failures == [] and saver.count == 2
    fresh: dict[str, Any] = {"model": {"a": torch.zeros(4), "b": torch.tensor(0)}, "rates": {"a": None}}
    load(tmp_path / "step_00000001", fresh)
    assert (
        fresh["model"]["a"].tolist() == [0, 1, 2, 3] and fresh["model"]["b"] == 7 and fresh["rates"]["a"] == [0.1, 0.2]
    )
    weight = torch.nn.Parameter(torch.tensor(0.0))
    load(tmp_path / "step_00000001", {"model": {"b": weight}})
    assert weight.item() == 7
    with pytest.raises(ValueError, match=r"has no model\.c"):
        load(tmp_path / "step_00000001", {"model": {"c": torch.zeros(4)}})
    with pytest.raises(ValueError, match=r"[Ss]ize"):
        load(tmp_path / "step_00000001", {"model": {"a": torch.zeros(5)}})
    with pytest.raises(ValueError, match=r"has no rates\.b"):
        load(tmp_path / "step_00000001", {"rates": {"b": 1}})


def test_files_of_a_library_are_on_disk_before_the_checkpoint_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, int]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    def save(folder: Path) -> None:
        (folder / "zero" / "rank0").mkdir(parents=True)
        (folder / "zero" / "part.pt").write_bytes(bytes(1000))
        (folder / "zero" / "rank0" / "swapped").write_bytes(bytes(2000))

    monkeypatch.setattr(os, "fsync", noted)
    saver = Saver(tmp_path / "saved", background=False)
    saver.save_with(save, 3, {}, "deepspeed")
    unfinished = unfinished_folder(tmp_path / "saved", 3)
    assert {(f"{unfinished}/zero/part.pt", 1000), (f"{unfinished}/zero/rank0/swapped", 2000)} <= set(flushed)
    assert {str(unfinished), f"{unfinished}/zero", f"{unfinished}/zero/rank0"} <= {path for path, _ in flushed}
    assert newest_whole(tmp_path / "saved").folder == saver.whole(3)


def test_what_all_ranks_hold_is_written_once(pool: RankPool, tmp_path: Path) -> None:
    state = {"model": {str(number): torch.zeros(10 + number) for number in range(20)}}
    parts = [shared_out(state, rank, 3)["model"] for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(state["model"])
    held = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(held) < 1.15 * min(held)
    two = Training(str(tmp_path / "two"), "ddp", 2, 2)
    found = run(pool, two)
    alone = train(0, Training(str(tmp_path / "one"), "none", 1, 2))
    assert found["figures"]["checkpoint_bytes"] < 1.1 * alone["figures"]["checkpoint_bytes"]
    assert manifest_of(checkpoints_of(two) / "step_00000002")["ranks"] == 2


def test_a_loop_of_ones_own(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(save_by_hand, str(tmp_path), (1, 2, 3))
    assert saved[0][-1] == saved[1][-1] == str(tmp_path / "step_00000003")
    numbers = [[3.0] * 3, [300.0 + number for number in range(12)]]
    assert pool.run(load_by_hand, str(tmp_path)) == [(3, 1.5, numbers, 2)] * 2
    assert load_by_hand(0, str(tmp_path)) == (3, 1.5, numbers, 2), "without a process group too"
    assert steps_in(tmp_path) == [2, 3]
    save_by_hand(0, str(tmp_path), (4,))
    assert pool.run(load_by_hand, str(tmp_path))[0][0] == 4


@pytest.mark.parametrize("name", ["values", "random"])
def test_a_state_that_would_overwrite_a_checkpoints_own_part_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"state: '{name}' is a part of every checkpoint"):
        save(tmp_path, {"model": {"a": torch.ones(2)}, name: torch.ones(3)}, step=1)
    assert steps_in(tmp_path) == []


def test_a_checkpoint_becomes_a_model(pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.answers.sharded_runs import Run, forward

    training = Training(str(tmp_path), "fsdp", 2, 2)
    weights = run(pool, training)["weights"]
    folder = tmp_path / "exported"
    source = checkpoints_of(training) / "step_00000002"
    assert main([str(checkpoints_of(training)), str(folder), "--dtype", "float32"]) == 0
    assert str(source) in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        np.testing.assert_array_equal(weight.detach().numpy(), weights[name], err_msg=name)
    tokens = [[5, 17, 200, 3, 99, 4]]
    ours = forward(0, Run(1, 1, 1, str(folder), tokens, pieces=(6,), new_tokens=3))
    assert ours is not None
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours["logits"], theirs, atol=1e-5)
    made = model.generate(torch.tensor(tokens), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert ours["tokens"].tolist() == made[:, 6:].tolist()
    indexed = tmp_path / "indexed"
    indexed.mkdir()
    (indexed / "model.safetensors.index.json").write_text("{}")
    assert main([str(source), str(indexed)]) == 2
    assert "names weights of another model" in capsys.readouterr().err and len(list(indexed.iterdir())) == 1
    _spoil(source, "short")
    assert main([str(source), str(folder)]) == 2
    assert "bytes instead of" in capsys.readouterr().err
    with pytest.raises(ValueError, match="does not say what model it is of"):
        save_by_hand(0, str(tmp_path / "own"), (1,))
        export(tmp_path / "own", folder)


def test_a_tokenizer_that_did_not_come_along_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = tmp_path / "node" / "tokenizer.json"
    told = {"config": {"model_type": "llama"}, "names": ["weight"], "tokenizer": str(tokenizer)}
    save(tmp_path / "made", {"model": {"weight": torch.ones(2)}}, step=1, progress={"export": told})
    export(tmp_path / "made", tmp_path / "first")
    assert f"{tokenizer}: not on this machine; {tmp_path / 'first'} gets no tokenizer" in capfd.readouterr().err
    tokenizer.parent.mkdir()
    tokenizer.write_text("{}")
    # Those of a conversation: its form, and the ends of its turns.
    companions = {"chat_template.jinja": "{{ messages }}", "generation_config.json": '{"eos_token_id": [1, 107]}'}
    for name, text in companions.items():
        (tokenizer.parent / name).write_text(text)
    export(tmp_path / "made", tmp_path / "second")
    assert "tokenizer" not in capfd.readouterr().err and (tmp_path / "second" / "tokenizer.json").is_file()
    assert {name: (tmp_path / "second" / name).read_text() for name in companions} == companions


# Saves without end; the step of each begun checkpoint is in its folder's name.
_SAVING = """
import sys
from pathlib import Path
import torch
from engine.training.checkpoints.saving import Saver
torch.set_num_threads(1)
state = {"model": {str(n): torch.zeros(400_000) for n in range(20)}}
saver = Saver(Path(sys.argv[1]))
for step in range(1, 10_000):
    for tensor in state["model"].values():
        tensor.fill_(step)
    saver.save(lambda: state, step, {"step": step})
"""


@pytest.mark.slow
def test_whatever_moment_a_process_is_killed_at_a_whole_one_is_left(tmp_path: Path) -> None:
    for number in range(6):
        process = subprocess.Popen([sys.executable, "-c", _SAVING, str(tmp_path)])
        try:
            deadline = time.monotonic() + 60
            while len(steps_in(tmp_path)) < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.037 * number)  # somewhere in the next ones
        finally:
            process.kill()
            process.wait()
        found = newest_whole(tmp_path)
        assert found.torn == () and found.folder is not None and found.checkpoint is not None
        state = {"model": {str(n): torch.empty(400_000) for n in range(20)}}
        load(found.folder, state)
        assert {value for tensor in state["model"].values() for value in tensor.unique().tolist()} == {
            float(found.checkpoint.step)
        }
        shutil.rmtree(tmp_path)
