"""`rankwise verify`: real launches on tiny models, each exit code, and nothing left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.common.execution import Layout
from configs.inputs.prompts import numbered_prompts, read_prompts
from configs.plans.model_manifest import POOLING, read_model_manifest
from configs.plans.paths import RunPaths
from configs.workloads.generate import GenerateWorkload
from configs.workloads.prompted import PromptedWorkload
from engine.planner.accelerators import LocalAccelerator
from flows.cli.verify.run import VerificationRequest, run_verify
from tasks.checks.own_prompts import MAX_POSITIONS, longest_sequence, own_prompts, position_limit
from tasks.checks.verification import BATCH_SIZE, NEW_TOKENS, prepare_verification
from tasks.checks.verification_inputs import VerificationSpec
from tests.support.cluster.launches import assert_nothing_left
from tests.support.patience import patient
from tests.support.run_folders.studies import RANKWISE

ROOT = Path(__file__).parents[4]
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Said:
    """What one verification came to."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama without a tokenizer, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("verify") / "tiny"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Good:
    """The verification of the model as it is, its reference saved and its run folder kept."""

    said: Said
    reference: Path
    run: Path


@pytest.fixture(scope="module")
def good(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    reference, run = folder / "good.zip", folder / "run"
    command = [RANKWISE, "verify", "--model", str(model), "--num-prompts", "9", "--new-tokens", "6", "--json"]
    command += ["--dtype", "bfloat16", "--save-reference", str(reference), "--keep", str(run)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return Good(Said(done.returncode, done.stdout, done.stderr), reference, run)


def verified(capsys: pytest.CaptureFixture[str], asked: VerificationSpec, **more: Any) -> Said:
    """One verification in this process, with JSON unless told otherwise."""
    capsys.readouterr()
    code = run_verify(VerificationRequest(asked, **{"as_json": True, **more}))
    printed = capsys.readouterr()
    return Said(code, printed.out, printed.err)


def changed(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of the model with other values in its config.json."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_good_model_agrees_and_its_record_is_kept(good: Good, model: Path) -> None:
    said = good.said
    assert said.code == 0, said.err + said.out
    assert (said.data["verdict"], said.data["exit_code"], said.data["kept"]) == ("agrees", 0, str(good.run))
    assert said.data["engine"] == "rankwise" and said.data["layout"] == {"dp": 1, "tp": 1, "pp": 1}
    assert (said.data["prompts"], said.data["new_tokens"], said.data["batch_size"]) == (9, 6, BATCH_SIZE)
    # The whole context is reached; what a larger batch or a longer answer would show is named.
    assert said.data["reached"] == {"positions": 128, "batch_size": BATCH_SIZE, "decode_steps": 8}
    assert said.data["not_reached"] == [f"batches of more than {BATCH_SIZE}", "decode steps from 9"]
    # 16 bits are checked in float32 too.
    assert [(check["dtype"], check["verdict"]) for check in said.data["checks"]] == [
        ("bfloat16", "agrees"),
        ("float32", "agrees"),
    ]
    assert [check["in_float32"] for check in said.data["checks"]] == ["agrees", None]
    for check in said.data["checks"]:
        assert 0 < check["ladder"]["logit_difference"] < 3 * check["noise"]["logit_difference"]
    assert {"plan.json", "study.yaml", "records", "jobs"} <= {path.name for path in good.run.iterdir()}
    assert list(good.run.glob("jobs/*/rank_0.log")) and "Traceback" not in said.err
    assert_nothing_left(good.run)


def test_the_prompts_are_token_ids_of_mixed_lengths(good: Good) -> None:
    [path] = [path for path in (good.run / "inputs").glob("*.jsonl") if len(path.stem) == 64]
    lengths = [len(prompt.tokens or ()) for prompt in numbered_prompts(path)]
    assert len(lengths) == 9 and sorted(lengths)[0] == 2 and len(set(lengths)) > 4
    assert not (good.run / "model").exists(), "no tokenizer is made up"


@pytest.mark.slow
def test_a_checkpoint_with_two_rows_swapped_is_a_defect_against_the_saved_reference(
    good: Good, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "bad")
    weights = load_file(tmp_path / "bad" / "model.safetensors")
    rows = weights["model.layers.1.mlp.up_proj.weight"]
    rows[[3, 70]] = rows[[70, 3]]
    save_file(weights, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    said = verified(capsys, VerificationSpec(str(tmp_path / "bad")), reference=good.reference)
    assert said.code == 4 and said.data["verdict"] == "defect" and said.data["reason"], said.out + said.err
    assert said.data["reference"]["file"] == str(good.reference)
    assert said.data["model"]["identity"] != said.data["reference"]["model"] and said.data["kept"] is None
    assert "transformers" not in said.err


@pytest.mark.parametrize("layout", [Layout(tp=2), pytest.param(Layout(pp=2), marks=pytest.mark.slow)], ids=str)
def test_layouts_agree_with_the_saved_reference(
    layout: Layout, good: Good, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = verified(capsys, VerificationSpec(str(model), layout), reference=good.reference, as_json=False)
    assert said.code == 0, said.out + said.err
    assert str(layout) in said.out and "agrees" in said.out and "noise" in said.out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layout": Layout(tp=3)}, ["--tp 3", "4 attention heads", "use one of: 1, 2, 4"]),
        ({"layout": Layout(pp=4)}, ["--pp 4", "3 layers"]),
        ({"layout": Layout(dp=4), "num_prompts": 3}, ["--num-prompts: got 3, fewer than replicas", "at least 4"]),
        ({"engine": "deepspeed"}, ["deepspeed", "tp of 2 or more"]),
        ({"engine": "transformers", "layout": Layout(tp=2, pp=2)}, ["transformers", "one rank, tp or pp only"]),
        ({"prompts": ROOT / "configs/studies/prompts.jsonl"}, ["no tokenizer.json", "Leave --prompts out"]),
        ({"new_tokens": 127}, ["fewer --new-tokens"]),
        ({"positions": 129}, ["--positions 129", "takes 128"]),
        ({"model": "no/such/folder"}, ["no/such/folder", "no such folder; expected"]),
        ({"model": "synthetic:llama-2m@0"}, ["did you mean"]),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_at_once_with_the_reason(
    asked: dict[str, Any], words: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = verified(capsys, replace(VerificationSpec(str(model)), **asked))
    assert said.code == 2 and said.data["verdict"] == "not supported"
    assert all(word in said.data["reason"] for word in words), said.data["reason"]
    assert "running" not in said.err


def test_an_unknown_architecture_and_an_unknown_activation(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = changed(model, tmp_path / "unknown", model_type="nothing-known", architectures=["Nothing"])
    said = verified(capsys, VerificationSpec(str(unknown)))
    assert said.code == 2 and "'nothing-known'" in said.data["reason"]
    activation = changed(model, tmp_path / "activation", hidden_act="tanh")
    said = verified(capsys, VerificationSpec(str(activation)))
    assert said.code == 2 and "hidden_act" in said.data["reason"] and said.data["kept"] is None
    assert "running" not in said.err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dtype": "float16"}, ["noise of bfloat16, float32", "--dtype float16"]),
        ({"new_tokens": 7}, ["--new-tokens 7", "saved with 6"]),
        ({"num_prompts": 20}, ["--num-prompts 20", "saved with 9"]),
        ({"positions": 64}, ["--positions 64", "saved with 128"]),
        ({"prompts": Path("p.jsonl")}, ["Leave --prompts out"]),
    ],
    ids=str,
)
def test_a_reference_that_does_not_fit_the_request(
    asked: dict[str, Any], words: list[str], good: Good, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = verified(capsys, replace(VerificationSpec(str(model)), **asked), reference=good.reference)
    assert said.code == 2 and all(word in said.data["reason"] for word in words), said.out


def test_a_reference_of_another_vocabulary_or_damaged_or_newer(
    good: Good, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(model, tmp_path / "other", vocab_size=VOCABULARY + 1)
    said = verified(capsys, VerificationSpec(str(other)), reference=good.reference)
    assert said.code == 2 and "vocabulary of 128" in said.data["reason"]
    encoder = changed(model, tmp_path / "encoder", model_type="bert", architectures=["BertModel"])
    said = verified(capsys, VerificationSpec(str(encoder)), reference=good.reference)
    assert said.code == 2 and "answers of a generate workload" in said.data["reason"], said.out
    assert said.data["reason"].endswith("expected the model's encode") and "running" not in said.err
    content = good.reference.read_bytes()
    for name, damaged in (("half", content[: len(content) // 2]), ("none", b""), ("text", b"not a zip")):
        (tmp_path / name).write_bytes(damaged)
        said = verified(capsys, VerificationSpec(str(model)), reference=tmp_path / name)
        assert said.code == 2 and "damaged, or not written by" in said.data["reason"]
    flipped = bytearray(content)
    flipped[content.index(b"samples.npz") + 200] ^= 255
    (tmp_path / "flipped").write_bytes(flipped)
    assert "damaged" in verified(capsys, VerificationSpec(str(model)), reference=tmp_path / "flipped").data["reason"]
    with zipfile.ZipFile(good.reference) as archive, zipfile.ZipFile(tmp_path / "newer", "w") as newer:
        for member in archive.namelist():
            text = archive.read(member)
            if member == "reference.json":
                text = json.dumps(json.loads(text) | {"schema_version": 99}).encode()
            newer.writestr(member, text)
    assert (
        "schema_version: got 99"
        in verified(capsys, VerificationSpec(str(model)), reference=tmp_path / "newer").data["reason"]
    )
    said = verified(capsys, VerificationSpec(str(model)), reference=tmp_path / "absent", as_json=False)
    assert said.code == 2 and "absent: No such file" in said.err and said.out == ""


def test_prompts_may_be_token_ids(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [127, 5]}\n')
    asked = VerificationSpec(str(model), prompts=tmp_path / "p.jsonl", new_tokens=2)
    verification = prepare_verification(asked, RunPaths(tmp_path / "run"), tmp_path / "cache", tmp_path, None)
    workload = verification.plan.cells[verification.asked_cell].workload
    assert isinstance(workload, GenerateWorkload)
    assert (workload.num_prompts, workload.batch_size, workload.longest_tokens) == (2, 2, None)


def test_a_file_with_fewer_prompts_than_replicas_is_named_itself(model: Path, tmp_path: Path) -> None:
    """`at rankwise, dp=4, float32: workload.num_prompts: got 2 ... Use at least 4`, of which a user has no option."""
    (tmp_path / "p.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [127, 5]}\n')
    asked = VerificationSpec(str(model), prompts=tmp_path / "p.jsonl", new_tokens=2, layout=Layout(dp=4))
    asks = {None: "--prompts: got 2", 3: "--prompts: got 2", 1: "--num-prompts: got 1"}
    for count, told in asks.items():
        with pytest.raises(ValueError, match=rf"^{told}, fewer than replicas \(dp=4\)\. Use at least 4$"):
            prepare_verification(
                replace(asked, num_prompts=count),
                RunPaths(tmp_path / f"run{count}"),
                tmp_path / "cache",
                tmp_path,
                None,
            )


@pytest.mark.slow
def test_a_dropped_window_is_found_from_beginning_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The window of 512 is in the reference, and not in the model that is verified."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": 1024, "sliding_window": 512, "num_hidden_layers": 2}
    MistralForCausalLM(MistralConfig(**sizes)).save_pretrained(tmp_path / "good")
    wide = changed(tmp_path / "good", tmp_path / "wide", sliding_window=None)
    few: dict[str, Any] = {"num_prompts": 4, "new_tokens": 4}
    saved = verified(capsys, VerificationSpec(str(tmp_path / "good"), **few), save=tmp_path / "good.zip")
    assert saved.code == 0, saved.out + saved.err
    said = verified(capsys, VerificationSpec(str(wide)), reference=tmp_path / "good.zip", as_json=False)
    assert said.code == 4 and "compared: sequences of 1,024 tokens" in said.out, said.out + said.err
    short = verified(capsys, VerificationSpec(str(tmp_path / "good"), positions=260, **few), save=tmp_path / "s.zip")
    assert short.code == 0 and "positions 261 to 1,024" in short.data["not_reached"], short.out
    said = verified(capsys, VerificationSpec(str(wide)), reference=tmp_path / "s.zip")
    assert said.code == 0 and said.data["reached"]["positions"] == 260
    said = verified(capsys, VerificationSpec(str(tmp_path / "good")), reference=tmp_path / "s.zip", as_json=False)
    assert "not reached: positions 261 to 1,024; the attention window of 512 tokens" in said.out


def test_places_that_cannot_be_written_are_refused(
    good: Good, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for more, words in (
        ({"keep": tmp_path / "full"}, "is not empty"),
        ({"keep": tmp_path / "no" / "such"}, "No such file"),
        ({"save": tmp_path / "no" / "such.zip"}, "expected a file in an existing folder"),
        ({"save": Path("/proc/a.zip")}, "--save-reference: /proc: "),
        ({"save": tmp_path / "a.zip", "reference": good.reference}, "mutually exclusive"),
    ):
        said = verified(capsys, VerificationSpec(str(model)), **more)
        assert said.code == 2 and words in said.data["reason"], said.out
    assert (tmp_path / "full" / "file").exists()


def test_a_model_with_a_tokenizer_gets_texts_of_mixed_lengths(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    asked = VerificationSpec(str(ROOT / "configs/models/tiny-stdlib"), num_prompts=12, dtype="bfloat16")
    verification = prepare_verification(asked, run, tmp_path / "cache", tmp_path, None)
    cells = verification.plan.cells
    assert len(cells) == 3 and cells[verification.asked_cell].dtype == "bfloat16"
    assert verification.check_cell is not None and cells[verification.check_cell].dtype == "float32"
    assert cells[verification.reference_cell].engine == "transformers"
    workload = cells[verification.asked_cell].workload
    assert isinstance(workload, GenerateWorkload)
    lengths = [len(text) for text in read_prompts(run.inputs / f"{workload.prompts}.jsonl")]
    assert len(lengths) == 12 and sorted(lengths)[:2] == [10, 60] and len(set(lengths)) > 8
    # One prompt is repeated to the model's limit, here 2,048 positions.
    assert workload.longest_tokens == 2048 - NEW_TOKENS
    assert not (run.folder / "model").exists()


def test_an_encoder_is_verified_with_the_pooling_that_it_names(tmp_path: Path) -> None:
    asked = VerificationSpec("synthetic:bert-1m@0")
    found = []
    for name in ("mean", "cls"):
        verification = prepare_verification(asked, RunPaths(tmp_path / name), tmp_path / "cache", tmp_path, None)
        found.append({cell.workload.model_dump()["pooling"] for cell in verification.plan.cells.values()})
        manifest = read_model_manifest(Path(verification.plan.models[0].manifest))
        (Path(manifest.folder) / "1_Pooling").mkdir(exist_ok=True)
        (Path(manifest.folder) / POOLING).write_text('{"pooling_mode": "cls"}')
    assert found == [{"mean"}, {"first"}]


@pytest.mark.parametrize("architecture", ["bert-1m", "t5-1m"])
def test_positions_without_a_stack_of_decoded_tokens_are_all_for_the_prompt(architecture: str, tmp_path: Path) -> None:
    """The default of 32 new tokens would leave none."""
    asked = VerificationSpec(f"synthetic:{architecture}@0", positions=32)
    verification = prepare_verification(asked, RunPaths(tmp_path / "run"), tmp_path / "cache", tmp_path, None)
    workload = verification.plan.cells[verification.asked_cell].workload
    assert isinstance(workload, PromptedWorkload) and workload.longest_tokens == 32
    with pytest.raises(ValueError, match=r"1 token for prompts, .* more --positions"):
        own_prompts(None, 50, 7, 1, 8)


def test_own_prompts_fit_and_repeat() -> None:
    lines = own_prompts(None, 50, 20, 300, NEW_TOKENS)
    assert lines == own_prompts(None, 50, 20, 300, NEW_TOKENS) and len(lines) == 20
    ids = [line["tokens"] for line in lines]
    assert [len(row) for row in ids[-3:]] == [2, 12, 192] and all(0 <= token < 50 for row in ids for token in row)
    # Every row of the full batches is fed through the cache for all steps.
    assert all(len(row) > NEW_TOKENS for row in ids[:16]) and len({len(row) for row in ids[:8]}) > 4
    assert max(len(line["tokens"]) for line in own_prompts(None, 50, 7, 30, 8)) == 30
    assert len(own_prompts(["ab"], 50, 1, 40, 8)[0]["prompt"]) == 32
    with pytest.raises(ValueError, match="--new-tokens"):
        own_prompts(None, 50, 7, 1, 8)


def test_the_longest_sequence_is_the_limit_or_beyond_the_window() -> None:
    llama = SIZES | {"model_type": "llama"}
    assert longest_sequence(llama, "m") == 128 and position_limit(llama, "m") == 128
    assert longest_sequence(llama | {"max_position_embeddings": 131072}, "m") == MAX_POSITIONS
    wide = llama | {"max_position_embeddings": 131072, "sliding_window": 4096, "model_type": "mistral"}
    assert 4096 < longest_sequence(wide, "m") < 5000
    # Of a family that nothing here knows, by its keys.
    assert longest_sequence({"model_type": "other", "n_positions": 512}, "m") == 512
    # Made for 512, and takes more.
    longt5 = {"model_type": "longt5", "n_positions": 512, "relative_attention_num_buckets": 32}
    assert longest_sequence(longt5, "m") == 512 and position_limit(longt5, "m") is None
    assert longest_sequence({"model_type": "other"}, "m") == MAX_POSITIONS


def test_neither_prefect_nor_torch_is_imported() -> None:
    code = "import sys, flows.cli.verify.run; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"prefect", "torch", "transformers", "matplotlib"} & set(loaded)


@contextlib.contextmanager
def running(model: Path, folder: Path, *more: str) -> "Iterator[subprocess.Popen[str]]":
    """The command in a process of its own, with temporary files below `folder`."""
    command = [RANKWISE, "verify", "--model", str(model), "--num-prompts", "4", *more]
    environment = os.environ | {"TMPDIR": str(folder)}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def job_file(folder: Path, name: str, process: "subprocess.Popen[str]") -> dict[str, Any]:
    """A file of the launch below `folder`, as soon as it is there."""
    deadline = time.monotonic() + patient(60)
    while True:
        assert process.poll() is None and time.monotonic() < deadline, f"there is no {name}"
        for path in folder.glob(f"**/{name}"):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(path.read_bytes().rstrip(b" \0"))
                return found
        time.sleep(0.02)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_no_defect_and_its_log_stays(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, "--json") as process:
        os.kill(job_file(tmp_path, "progress_0.json", process)["pid"], signal.SIGKILL)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 3, out + err
    data = json.loads(out)
    assert data["verdict"] == "failed" and "SIGKILL" in data["reason"]
    assert Path(data["log"]).is_file() and Path(data["kept"]) in Path(data["log"]).parents
    assert "running transformers" not in err and "Traceback" not in err
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_ending_the_command_ends_the_launch_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as process:
        job_file(tmp_path, "launcher.json", process)
        process.terminate()
        out, err = process.communicate(timeout=600)
    assert process.returncode == 1 and "all launches ended" in err and not out
    assert list(tmp_path.iterdir()) == []
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("ended", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_the_folder_of_keep_stays_where_the_command_is_ended(
    ended: BaseException | type[BaseException], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_until_ended(verification: Any, *_: object) -> None:
        raise ended

    monkeypatch.setattr("flows.cli.verify.run.run_verification", run_until_ended)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    asked = VerificationSpec(str(model))
    assert run_verify(VerificationRequest(asked, keep=tmp_path / "kept")) == 1
    assert (tmp_path / "kept" / "plan.json").is_file()
    assert run_verify(VerificationRequest(asked)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_more_ranks_than_gpus_are_refused_before_anything_is_started(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = LocalAccelerator(name="NVIDIA A10G")
    monkeypatch.setattr("flows.cli.verify.run.local_devices", lambda target: (gpu, gpu))
    assert run_verify(VerificationRequest(VerificationSpec(str(model), Layout(tp=4)))) == 2
    said = capsys.readouterr().err
    assert "--layout: 4 ranks, but this machine has 2 x NVIDIA A10G, one for each rank. With CUDA_VISIBLE_" in said
