"""`rankwise plan`: what it prints, writes and refuses, as a user types it."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from configs.hardware.catalog import instance
from configs.spec.study import load_study
from configs.targets.target import SlurmTarget
from configs.workloads.train import TrainWorkload
from engine.planner.accelerators import LocalAccelerator
from engine.planner.catalog import find_model
from engine.planner.cells import DATA_SHEET_FACTOR
from flows.cli.plan import text as plan_text
from flows.cli.plan.benchmark import LocalRanks, benchmark
from flows.cli.plan.command import plan
from flows.cli.plan.model import split_words
from flows.cli.plan.request import PlanRequest

app = typer.Typer()
app.command()(plan)


@app.callback()
def _main(context: typer.Context) -> None:
    context.obj = {"debug": False}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*words: str, code: int = 0) -> Any:
    return json.loads(said(*words, "--json", code=code))


def test_the_answer_comes_first() -> None:
    out = said("--model", "opt-6.7b", "--gpus", "4", "--batch-size", "8", "--max-memory-gb", "24",
               "--accelerator", "a100-40gb")  # fmt: skip
    first = out.splitlines()[0]
    assert "on 4 x a100-40gb" in first
    assert "tokens/s" in first
    assert "of 24.0 GB" in first
    for part in ("Rule of thumb", "memory per GPU", "optimizer", "Step ", "Cost ", "fastest", "Does not fit"):
        assert part in out
    assert "Hardware  " not in out  # it was named


def test_hardware_is_chosen_where_none_is_named() -> None:
    out = said("--model", "gpt2", "--mode", "inference", "--batch-size", "8")
    assert "Hardware " in out
    assert "USD/M tokens" in out
    assert "choices fit" in out
    found = as_json("--model", "gpt2", "--mode", "inference", "--batch-size", "8")
    assert found["hardware"]["instance"] == found["plan"]["machine"]
    assert found["plan"]["batch_size"] == 8


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["--hardware", "cuda", "rocm"], {"cuda", "rocm"}),
        (["--hardware", "cuda", "rocm", "cpu"], {"cuda", "rocm", "cpu"}),
        (["--hardware", "cuda", "--hardware", "cpu"], {"cuda", "cpu"}),
        (["--hardware", "rocm,cpu"], {"rocm", "cpu"}),
        (["--hardware", "cpu"], {"cpu"}),
    ],
)
def test_several_kinds_of_hardware_follow_one_option(words: list[str], kinds: set[str]) -> None:
    found = as_json(*words, "--model", "gpt2", "--mode", "inference")["hardware"]
    rows = [*found["options"], *found["without_price"], *found["too_slow"], *found["does_not_fit"]]
    assert {row["hardware"] for row in rows} == kinds


def test_words_are_told_apart() -> None:
    assert split_words(["rocm", "study.yaml", "cpu"], ["cuda"]) == (("cuda", "rocm", "cpu"), ["study.yaml"])
    assert split_words(["study.yaml"], []) == ((), ["study.yaml"])
    assert split_words([], ["cuda, cpu", "cpu"]) == (("cuda", "cpu"), [])


def test_a_study_goes_to_the_study_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    module = type(sys)("flows.cli.plan.study")
    module.plan_study = lambda *given, **named: asked.append((given, named)) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flows.cli.plan.study", module)
    said("study.yaml", "--set", "measuring.repeats=3", "--accelerator", "t4", "--output", "cells.csv")
    ((given, named),) = asked
    assert given == (Path("study.yaml"), ["measuring.repeats=3"], False)
    assert named == {"learn_from": None, "machine": "t4", "output": Path("cells.csv"), "own": None}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "expected one of: STUDY.yaml"),
        (["a.yaml", "b.yaml"], 2, "expected one of"),
        (["study.yaml", "--model", "gpt2"], 2, "expected one of"),
        (["--model", "gpt2", "--hardware", "cuda", "tpu"], 2, "--hardware tpu: use one or more of: cuda rocm cpu"),
        (["--model", "gpt2", "--hardware", "h100"], 2, "cuda rocm cpu. For this one: --accelerator h100-80gb"),
        (["--model", "gpt2", "--hardware", "gpu"], 2, "--hardware gpu"),
        (["--model", "gpt2", "--mode", "serving"], 2, "--mode"),
        (["--model", "gpt2", "--gpus", "0"], 2, "--gpus"),
        (["--model", "acme/none"], 2, "config.json"),
        (["--model", "gpt2", "--accelerator", "h1000"], 2, "did you mean"),
        (["--model", "gpt2", "--max-memory-gb", "-3"], 2, "max_memory_gb: -3"),
        (["study.yaml", "--gpus", "4"], 2, "--gpus: has no effect on a study"),
        (["study.yaml", "--mode", "inference"], 2, "--mode: has no effect on a study"),
        (["study.yaml", "--batch-size", "4"], 2, "--batch-size: has no effect on a study"),
        (["study.yaml", "--hardware", "cuda"], 2, "--hardware: has no effect on a study"),
        (["--model", "gpt2", "--learn-from", "runs/*"], 2, "--learn-from runs/*: no run folder"),
        (["--model", "gpt2", "--gpus", "4", "--max-gpus", "2"], 2, "--gpus, --max-gpus: mutually exclusive"),
        (["--model", "gpt2", "--hardware", "rocm", "--accelerator", "h100-80gb"], 2, "h100-80gb is cuda"),
        (["--model", "gpt2", "--family", "bananas"], 2, "use one of: text_generation"),
        (["--guide", "--spot"], 2, "--spot: has no effect on --guide"),
        (
            ["--model", "opt-1.3b", "--new-tokens", "5"],
            2,
            "--new-tokens: has no effect on training. Add --mode inference",
        ),
    ],
)
def test_what_is_wrong_is_named(words: list[str], code: int, message: str) -> None:
    out = said(*words, code=code)
    assert message in out
    assert "Traceback" not in out


def test_files_for_every_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    words = ["--model", "opt-1.3b", "--gpus", "4", "--accelerator", "a100-80gb", "--output", str(folder)]
    out = said(*words, "--batch-size", "4")
    written = json.loads((folder / "plan.json").read_text())["plan"]
    assert (folder / "torchrun.sh").exists()
    for name in ("torchrun.json", "deepspeed.json"):
        if not (folder / name).exists():
            assert f"Skipped          {name}" in out
    arguments = json.loads((folder / "training_arguments.json").read_text())
    assert arguments["per_device_train_batch_size"] == written["per_gpu_batch_size"]
    # A plan that does not fit leaves no file to start it with, not even an older one.
    refused = ["--model", "opt-66b", "--gpus", "2", "--accelerator", "a10g", "--output", str(folder)]
    assert "Nothing fits" in said(*refused, code=3)
    assert [path.name for path in folder.iterdir()] == ["plan.json"]


def test_ranks_that_do_not_fill_their_nodes_leave_the_plan_and_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    folder.mkdir()
    (folder / "torchrun.sh").write_text("of an earlier plan")
    out = said("--model", "opt-1.3b", "--gpus", "9", "--accelerator", "h100-80gb", "--output", str(folder))
    assert "Skipped          launcher files: 9 ranks do not fill 2 nodes of 8 equally; use a multiple of 2" in out
    assert [path.name for path in folder.iterdir()] == ["plan.json"]
    assert json.loads((folder / "plan.json").read_text())["plan"]["gpu_count"] == 9


def test_large_numbers_are_written_out() -> None:
    words = ["--model", "llama-2-70b", "--gpus", "8", "--batch-size", "4096", "--accelerator", "h100-80gb"]
    out = said(*words)
    assert re.search(r"Step +\d,\d{3} s per step", out) and "1,793.4 GB" in out  # of DDP, which does not fit
    long = ["--model", "llama-3.1-405b", "--accelerator", "a100-80gb", "--gpus", "16", "--sequence-length", "100000"]
    slow = said("--serve", *long)
    assert re.search(r"TTFT \d{3} s, TPOT \d,\d{3} ms", slow)
    assert "e+" not in out + slow


def test_nothing_fits() -> None:
    out = said("--model", "opt-66b", "--gpus", "2", "--accelerator", "a10g", code=3)
    assert out.startswith("Nothing fits")
    assert "Smallest change" in out
    assert "Cost" not in out
    found = as_json("--model", "llama-2-70b", "--mode", "inference", "--gpus", "1", "--accelerator", "t4", code=3)
    assert found["plan"]["fits"] is False


def test_the_fewest_gpus_of_a_named_kind() -> None:
    words = ["--model", "llama-2-70b", "--mode", "inference", "--accelerator", "a100-80gb"]
    assert as_json(*words, "--max-gpus", "8")["plan"]["gpu_count"] == 2
    assert as_json(*words, "--distributed")["plan"]["gpu_count"] == 2
    assert as_json(*words, code=3)["plan"]["gpu_count"] == 1


def test_own_hardware_and_single_figures(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "as_of: 2026-11-01\nsource: our cluster\n"
        "instances:\n  lab/rack: {accelerator: a100-80gb, accelerators: 4, vcpus: 64, host_memory_bytes: 1e12}\n"
    )
    words = ["--model", "opt-1.3b", "--gpus", "4", "--catalog", "mine.yaml"]
    rack = as_json(*words, "--accelerator", "lab/rack")["plan"]
    assert (rack["machine"], rack["usd_per_million_tokens"]) == ("lab/rack", None)
    found = as_json(*words)["hardware"]
    assert "lab/rack" in {row["instance"] for row in found["without_price"]}
    less = ["--model", "opt-6.7b", "--gpus", "1", "--accelerator", "h100-80gb", "--set", "h100-80gb.memory_bytes=2e9"]
    assert "of 2.0" in said(*less, code=3)


@pytest.mark.slow
def test_one_market_prices_everything() -> None:
    words = ["--model", "opt-1.3b", "--gpus", "8", "--batch-size", "8"]
    found = as_json(*words, "--spot")
    plan, hardware = found["plan"], found["hardware"]
    assert plan["market"] == hardware["market"] == "spot"
    chosen = hardware["recommendation"]
    assert plan["usd_per_hour"] == chosen["usd_per_hour"] is not None
    assert plan["usd_per_million_tokens"] == pytest.approx(chosen["usd_per_million_tokens"])
    named = [*words, "--accelerator", chosen["instance"]]
    assert as_json(*named)["plan"]["usd_per_hour"] > as_json(*named, "--spot")["plan"]["usd_per_hour"]
    assert "the catalog has no spot price of aws/p6-b200" in said(
        *words, "--accelerator", "aws/p6-b200.48xlarge", "--spot"
    )


def test_a_prediction_has_a_range() -> None:
    words = ["--model", "opt-1.3b", "--gpus", "8", "--accelerator", "h100-80gb"]
    plan = as_json(*words)["plan"]
    time = plan["predicted_time"]
    assert time["low"] == pytest.approx(plan["step_seconds"] / DATA_SHEET_FACTOR)
    assert time["high"] == pytest.approx(plan["step_seconds"] * DATA_SHEET_FACTOR)
    line = next(line for line in said(*words).splitlines() if line.startswith("Step "))
    assert f"{plan['step_seconds']:.3g} s per step ({time['low']:.2g} to {time['high']:.2g})" in line
    served = as_json(*words, "--mode", "inference")["plan"]
    assert served["predicted_time"]["low"] < served["batch_seconds"] < served["predicted_time"]["high"]


def test_an_encoder_has_no_first_token() -> None:
    words = ["--model", "bert-base-uncased", "--mode", "inference", "--accelerator", "h100-80gb"]
    assert "first token" not in said(*words)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_what_would_help_is_named(mode: str) -> None:
    out = said("--model", "llama-2-70b", "--gpus", "1", "--max-memory-gb", "8", "--mode", mode, code=3)
    assert (
        "Smallest change  " in out and "('" not in out and "the leanest, one " in out.lower().replace("one  ", "one ")
    )


def test_a_folder_that_cannot_be_written_is_named_alone() -> None:
    Path("file").write_text("")
    out = said("--model", "gpt2", "--gpus", "1", "--accelerator", "h100-80gb", "--output", "file/plan", code=2)
    assert "file" in out and "measured before" not in out


def test_models_that_are_known_by_name() -> None:
    found = {model["name"]: model for model in as_json("--list-models")}
    assert found["bert-base-uncased"]["kind"] == "encoder"
    assert found["opt-1.3b"]["parameters"] == 1_315_758_080
    out = said("--list-models")
    assert "facebook/opt-1.3b" in out
    assert "config.json" in out


def test_the_guide_is_computed() -> None:
    out = said("--guide", "--accelerator", "a100-80gb")
    assert "on a100-80gb" in out
    assert "65B" in out
    assert list(as_json("--guide")) == ["a100-80gb", "a10g"]


A10G = LocalAccelerator(name="NVIDIA A10G", memory_bytes=24 << 30)


class TestBenchmark:
    @pytest.mark.parametrize(
        ("kinds", "ranks", "nodes"),
        [(["cuda"], 8, 1), (["cuda", "rocm"], 8, 1), (["cuda"], 16, 2), (["rocm"], 6, 1), (["cuda", "cpu"], 4, 1)],
    )
    def test_gpus_that_were_asked_for_are_the_target(
        self, kinds: list[str], ranks: int, nodes: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from flows.cli.run import validate_study

        words = ["--model", "bert-base-uncased", "--distributed", "--max-gpus", str(ranks), "--hardware", *kinds]
        said(*words, "--batch-size", "2", "--benchmark-out", "bert.yaml")
        study, text = load_study(Path("bert.yaml")), Path("bert.yaml").read_text()
        assert [target.name for target in study.targets] == [kind for kind in kinds if kind != "cpu"]
        for target in study.targets:
            assert isinstance(target, SlurmTarget)
            assert (target.nodes, target.nodes * target.ranks_per_node) == (nodes, ranks)
            assert target.gpus_per_node == target.ranks_per_node
            if target.machine is not None:
                device = instance(target.machine).accelerator
                assert device.kind == target.name
        assert [model.id for model in study.models] == ["bert-base-uncased"]
        strong = study.experiments["strong"].model_dump()
        assert (strong["grow"], strong["to"]) == ("dp", ranks)
        variants = study.experiments["strategies"].model_dump()
        assert variants["baseline"] == {"layout.dp": ranks, "layout.strategy": "ddp"}
        assert variants["variants"].keys() == {"fsdp", "zero1", "zero2", "zero3"}
        assert "#   hardware cuda" not in text and ("#   hardware cpu: " in text) == ("cpu" in kinds)
        assert validate_study(Path("bert.yaml"), []) == 0
        assert "valid" in capsys.readouterr().out

    def test_gpus_of_this_machine_are_a_local_target(self) -> None:
        request = PlanRequest(model="gpt2", distributed=True, max_gpus=4)
        for devices, kind in ((4, "local"), (2, "slurm")):
            here = LocalRanks(cores=2, accelerators=(A10G,) * devices, host_memory_bytes=1 << 35)
            text, _ = benchmark(request, find_model("gpt2"), ["cuda"], Path.cwd(), here)
            Path("study.yaml").write_text(text)
            (target,) = load_study(Path("study.yaml")).targets
            assert target.kind == kind

    def test_ranks_of_this_machine_are_its_gpus_unless_cpu_is_said(self) -> None:
        request = PlanRequest(model="gpt2", distributed=True, max_gpus=8)
        here = LocalRanks(cores=2, accelerators=(A10G,) * 8, host_memory_bytes=1 << 35)
        for hardware, ranks, targets in (([], 8, "device: null"), (["cpu"], 2, "device: cpu")):
            text, _ = benchmark(request, find_model("gpt2"), hardware, Path.cwd(), here)
            Path("study.yaml").write_text(text)
            study = load_study(Path("study.yaml"))
            assert study.experiments["strong"].model_dump()["to"] == ranks
            assert [f"device: {target.device or 'null'}" for target in study.targets] == [targets]

    def test_a_stand_in_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
        words = ["--model", "llama-2-70b", "--distributed", "--max-gpus", "4", "--hardware", "cpu"]
        out = said(*words, "--batch-size", "2", "--benchmark-out", "llama.yaml")
        study, text = load_study(Path("llama.yaml")), Path("llama.yaml").read_text()
        assert study.study == "llama-2-70b-stand-in"
        assert study.models[0].id.startswith("synthetic:llama-")
        assert isinstance(study.workload, TrainWorkload)
        assert (study.workload.task, study.workload.global_batch_size) == ("causal_lm", 8)
        assert {"batch", "precision", "strong", "weak", "strategies"} <= study.experiments.keys()
        for what in ("model llama-2-70b", "layout pp=4"):
            assert f"#   {what}: " in text
            assert f"comment only  {what}: " in out
        assert "GB per rank, more than this machine has; replaced by llama-" in text

    def test_tensor_parallelism_is_measured_where_the_engine_splits_the_model(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
        for ranks, measured in ((2, True), (4, False)):  # llama-4m has 2 key and value heads
            words = ["--model", "synthetic:llama-4m@0", "--distributed", "--max-gpus", str(ranks)]
            file = Path(f"study_{ranks}.yaml")
            said(*words, "--benchmark-out", str(file))
            study, text = load_study(file), file.read_text()
            variants = study.experiments["strategies"].model_dump()["variants"]
            assert (f"tp={ranks}" in variants) == measured == (f"layout tp={ranks}: " not in text)
            assert {"fsdp", "zero1", "zero2", "zero3"} <= variants.keys()
        assert "2 key and value heads are not divisible by 4" in text

    def test_nothing_is_dropped_in_silence(self) -> None:
        """Each strategy is either measured or in the comments."""
        said("--model", "gpt2", "--distributed", "--benchmark-out", "study.yaml")
        text = Path("study.yaml").read_text()
        measured = load_study(Path("study.yaml")).experiments.get("strategies")
        for strategy in ("fsdp", "zero1", "zero2", "zero3"):
            in_study = measured is not None and strategy in getattr(measured, "variants", {})
            assert in_study != (f"strategy {strategy}: " in text)

    def test_validate_accepts_it_on_this_machine(self, capsys: pytest.CaptureFixture[str]) -> None:
        from flows.cli.run import validate_study

        said("--model", "t5-small", "--distributed", "--max-gpus", "64", "--benchmark-out", "study.yaml")
        assert validate_study(Path("study.yaml"), []) == 0
        assert "valid" in capsys.readouterr().out
        assert "ranks above" in Path("study.yaml").read_text()

    @pytest.mark.parametrize(("ranks", "degrees"), [(3, [1, 3]), (6, [1, 2, 6]), (12, [1, 2, 4, 12])])
    def test_ranks_that_are_no_power_of_two_have_a_valid_study(self, ranks: int, degrees: list[int]) -> None:
        """Two of six ranks share a batch of six, and four of them do not: `validate` refused what was written."""
        from flows.cli.run import validate_study

        said("--model", "bert-base-uncased", "--hardware", "cuda", "--gpus", str(ranks), "--benchmark-out", "bert.yaml")
        study, text = load_study(Path("bert.yaml")), Path("bert.yaml").read_text()
        strong = study.experiments["strong"].model_dump()
        assert (strong["points"], strong["to"]) == (degrees, None)
        assert study.experiments["weak"].model_dump()["to"] == ranks
        left_out = {1 << bit for bit in range(4) if 1 << bit < ranks} - set(degrees)
        for degree in left_out:
            assert f"#   strong scaling at {degree} ranks: a batch of {ranks} is not divisible by {degree}" in text
        assert validate_study(Path("bert.yaml"), []) == 0

    def test_a_synthetic_model_is_itself(self) -> None:
        said("--model", "synthetic:llama-4m@1", "--benchmark-out", "study.yaml")
        study = load_study(Path("study.yaml"))
        assert [model.id for model in study.models] == ["synthetic:llama-4m@1"]
        assert study.study == "llama-4m-training"
        assert "strong" not in study.experiments

    @pytest.mark.parametrize(
        ("model", "task"), [("vit-base", "image_classification"), ("distilbert-base-uncased", "masked_lm")]
    )
    def test_a_model_that_transformers_computes_is_itself(self, model: str, task: str) -> None:
        request = PlanRequest(model=model)
        here = LocalRanks(cores=2, accelerators=(), host_memory_bytes=1 << 35)
        text, comments = benchmark(request, find_model(model), [], Path.cwd(), here)
        Path("study.yaml").write_text(text)
        study = load_study(Path("study.yaml"))
        assert [each.id for each in study.models] == [model] and isinstance(study.workload, TrainWorkload)
        assert study.workload.task == task and not any(what.startswith("model") for what, _ in comments)

    def test_audio_has_a_stand_in(self) -> None:
        out = said("--model", "whisper-tiny", "--benchmark-out", "study.yaml")
        assert "models of type whisper (38 million parameters) are not supported in training; replaced by t5-" in out

    def test_a_length_that_is_not_measured_is_told(self) -> None:
        words = ["--sequence-length", "4096", "--hardware", "cpu", "--benchmark-out"]
        out = said("--model", "llama-2-70b", *words, "a.yaml")
        study = load_study(Path("a.yaml"))
        assert isinstance(study.workload, TrainWorkload)
        assert f"comment only  sequence length 4,096: {study.models[0].name}" in out
        assert f" has {study.workload.sequence_length:,} positions" in out
        out = said("--model", "gpt2", *words, "b.yaml", code=2)
        assert "gpt2 has 1,024 positions; sequences of 4,096 tokens do not go in" in out

    def test_json_says_what_was_left_out(self) -> None:
        found = as_json("--model", "gpt2", "--max-gpus", "2", "--benchmark-out", "study.yaml")
        assert found["written"] == "study.yaml" and found["left_out"][0].keys() == {"what", "reason"}

    def test_a_study_that_was_edited_is_kept(self) -> None:
        words = ["--model", "synthetic:llama-4m@1", "--benchmark-out", "study.yaml"]
        for _ in range(2):
            said(*words)
        edited = Path("study.yaml").read_text() + "# mine\n"
        Path("study.yaml").write_text(edited)
        assert "study.yaml: exists already with other content" in said(*words, code=2)
        assert Path("study.yaml").read_text() == edited

    def test_inference_is_refused(self) -> None:
        out = said("--model", "gpt2", "--mode", "inference", "--benchmark-out", "study.yaml", code=2)
        assert "supports training only" in out
        assert not Path("study.yaml").exists()


def test_tables_are_plain_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli.tables import print_table

    print_table(("name", "GB"), [("a", "1.0"), ("bcd", "12.5")])
    assert capsys.readouterr().out == "name    GB\na      1.0\nbcd   12.5\n"


def test_a_layout_of_ones_own_script_is_offered_where_it_gains() -> None:
    config = {"fastest_layout": {"fits": True, "step_seconds": 1.0, "title": "FSDP, dp=2 x tp=2"}, "step_seconds": 1.5}
    assert "50% faster" in str(plan_text._own_script(config))
    config["step_seconds"] = 1.01
    assert plan_text._own_script(config) is None


@pytest.mark.parametrize(
    ("guide", "own"),
    [
        (
            "--model-family text_generation --model-name llama-7b --batch-size 16 --mode training --distributed "
            "--gpu-count 8",
            "--family text_generation --model llama-7b --batch-size 16 --mode training --distributed --gpus 8",
        ),
        (
            "--model-family text_generation --model-name llama-7b --mode training --distributed --gpu-count 8 "
            "--max-memory-gb 24",
            "--family text_generation --model llama-7b --distributed --gpus 8 --max-memory-gb 24",
        ),
        ("--model t5-small --hardware cuda rocm --distributed --max-gpus 8",) * 2,
    ],
)
def test_the_argument_names_of_the_guide(guide: str, own: str) -> None:
    out = said(*guide.split())
    assert out == said(*own.split()) and "tokens/s" in out


def test_a_plan_as_one_file() -> None:
    out = said("--model", "bert-base-uncased", "--distributed", "--max-gpus", "4", "--output", "bert_benchmark.json")
    assert "File             bert_benchmark.json" in out
    answer = json.loads(Path("bert_benchmark.json").read_text())
    assert answer["plan"]["fits"] and answer["hardware"]["instance"]


def test_a_models_name_in_the_place_of_a_study_is_recognised() -> None:
    out = said("llama-3.1-8b", code=2)
    assert out == "llama-3.1-8b: no such study. For the model: --model llama-3.1-8b\n"


def test_the_plan_says_what_it_rests_on_and_what_to_measure_next() -> None:
    words = ("--model", "gpt2", "--mode", "inference", "--accelerator", "h100-80gb")
    out, plan = said(*words), as_json(*words)["plan"]
    assert "Predicted from   the data sheet of h100-80gb" in out
    assert plan["measure_next"] == "a run of this layout, for --learn-from; the factor would be 1.22 instead of 1.60"
    tpu = as_json("--model", "gpt2", "--accelerator", "tpu-v6e")["plan"]  # named, it needs no --hardware
    assert tpu["measure_next"] is None
    assert tpu["support"].endswith("Rankwise does not run on tpu")


def test_lengths_beyond_the_model_are_said_and_layouts_written_as_in_a_study() -> None:
    words = ("--model", "deepseek-v3", "--mode", "inference", "--accelerator", "gb300", "--gpus", "72")
    plan = as_json(*words, "--sequence-length", "200000")["plan"]
    assert plan["assumptions"] == ["sequences of 200,000 tokens, although deepseek-v3 was made for 163,840"]
    assert plan["explanation"].startswith("tp=")
