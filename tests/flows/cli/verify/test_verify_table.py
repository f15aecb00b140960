"""`rankwise verify` over models and layouts: real launches of every kind of model, one table, one exit code."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES, one_of_each_family
from configs.plans.paths import RunPaths
from flows.cli.main import app
from flows.cli.verify import table as verify_table
from flows.cli.verify.table import LAYOUTS, layout_of
from flows.cli.verify.text import VerificationOutcome
from tasks.checks.verification import prepare_verification
from tasks.models.saved_reference import read_saved_reference, save_reference
from tests.support.run_folders.made_studies import write_record
from tests.support.run_folders.studies import RANKWISE


def test_layouts_are_written_by_their_degrees() -> None:
    assert layout_of("tp=2") == Layout(tp=2)
    assert layout_of("tp=2, pp=3,dp=1") == Layout(tp=2, pp=3)
    for wrong in ("2", "tp=", "tp=0", "ep=2", "tp=2;pp=2", "", "tp=2,tp=4", "tp=65537"):
        with pytest.raises(ValueError, match=r"expected a layout such as tp=2, pp=2 or dp=1,tp=2,pp=2"):
            layout_of(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a model"),
        (["--model", "a", "--layout", "tp2"], "expected a layout such as tp=2"),
        (["--model", "a", "--tp", "65537"], "less than or equal to 65536"),
        (["--model", "a", "--layout", "tp=2", "--tp", "2"], "cannot be combined with --tp"),
        (["--model", "a", "--model", "b", "--save-reference", "x.zip"], "requires one model in one layout"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_all_architectures_are_one_of_each_family_in_three_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(verify_table, "run_table", lambda *arguments: asked.append(arguments) or 0)
    assert CliRunner().invoke(app, ["verify", "--all-architectures"]).exit_code == 0
    models, layouts, *_ = asked[0]
    assert models == [f"synthetic:{name}@0" for name in one_of_each_family()] and layouts == list(LAYOUTS)
    families = {ARCHITECTURES[name]["model_type"] for name in one_of_each_family()}
    assert families >= {"gpt2", "opt", "gpt_neox", "gemma", "phi3", "bert", "t5", "llama"}


def test_what_cannot_be_verified_is_a_row_and_sets_the_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tasks.checks.verification_inputs import VerificationSpec

    models = ["synthetic:bert-1m@0", "synthetic:no-such@0"]
    code = verify_table.run_table(
        models, [Layout(tp=3), Layout(pp=9)], VerificationSpec(""), tmp_path / "kept", as_json=True
    )
    rows = json.loads(capsys.readouterr().out)
    assert code == 2 and [row["verdict"] for row in rows] == ["not supported"] * 4
    assert [row["layout"] for row in rows] == ["tp=3", "pp=9"] * 2
    assert "are not divisible by 3 ranks" in rows[0]["reason"] and "has 4 layers" in rows[1]["reason"]
    assert "unknown architecture 'no-such'" in rows[2]["reason"]


def test_rows_before_a_model_that_cannot_be_fetched_are_printed_as_they_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.checks.verification_inputs import VerificationSpec
    from tasks.models.sources import TransientFetchError

    def of_model(asked: VerificationSpec, *_: object) -> list[verify_table.VerificationRow]:
        if asked.model == "two":
            raise TransientFetchError("two: the hub does not answer")
        return [verify_table.VerificationRow(asked.model, "decoder", "tp=2", "agrees", "")]

    monkeypatch.setattr(verify_table, "_of_model", of_model)
    models = ["/models/[old]/[/b]one", "two"]
    assert verify_table.run_table(models, [Layout(tp=2)], VerificationSpec(""), tmp_path / "kept", as_json=False) == 1
    printed = capsys.readouterr()
    assert "/models/[old]/[/b]one  decoder  tp=2" in printed.out and "the hub does not answer" in printed.err


def test_what_is_named_twice_is_verified_once_and_a_full_folder_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tasks.checks.verification_inputs import VerificationSpec

    def table(kept: Path) -> int:
        twice = ["synthetic:bert-1m@0"] * 2, [Layout(tp=3), Layout(pp=9), Layout(tp=3)]
        return verify_table.run_table(*twice, VerificationSpec(""), kept, as_json=True)

    assert table(tmp_path / "kept") == 2
    assert [row["layout"] for row in json.loads(capsys.readouterr().out)] == ["tp=3", "pp=9"]
    assert table(tmp_path / "kept") == 2
    assert capsys.readouterr() == ("", f"--keep: {tmp_path / 'kept'} is not empty. Use a new folder\n")


def test_rows_before_an_interruption_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.checks.verification_inputs import VerificationSpec

    def verified(request: Any, *_: object) -> Any:
        if request.asked.layout.pp > 1:
            raise KeyboardInterrupt
        return VerificationOutcome("not supported", "its reason"), None, None

    monkeypatch.setattr(verify_table, "verified", verified)
    layouts = [Layout(tp=2), Layout(pp=2)]
    assert verify_table.run_table(["m"], layouts, VerificationSpec(""), tmp_path / "kept", as_json=False) == 1
    printed = capsys.readouterr()
    assert "m, tp=2: not supported: its reason" in printed.out and printed.err.endswith("all launches ended\n")


@pytest.mark.parametrize(("verdict", "kept"), [("failed", True), ("not judged", True), ("not supported", False)])
def test_run_folders_are_kept_where_a_row_has_no_verdict(
    verdict: Any, kept: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for one model in one layout; the logs that would have said why a rank crashed were gone."""
    from tasks.checks.verification_inputs import VerificationSpec

    def verified(_: Any, run: RunPaths) -> Any:
        (run.folder / "rank_0.log").write_text("Segmentation fault")
        return VerificationOutcome(verdict, "a rank crashed"), None, None

    monkeypatch.setattr(verify_table, "verified", verified)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    verify_table.run_table(["m"], [Layout(tp=2)], VerificationSpec(""), None, as_json=False)
    logs = [str(path) for path in tmp_path.rglob("rank_0.log")]
    assert len(logs) == kept
    [folder] = [line.partition("run folders: ")[2] for line in capsys.readouterr().err.splitlines()[1:]] or ["none"]
    assert all(log.startswith(f"{folder}/0_m/") for log in logs) and (folder != "none") == kept


def test_layouts_after_the_first_answer_the_prompts_of_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved reference brings what it was asked; here the number of prompts is that of the file."""
    from tasks.checks.verification_inputs import VerificationSpec

    (tmp_path / "p.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [17, 5]}\n')
    made: list[Any] = []

    def verified(request: Any, run: RunPaths) -> Any:
        saved = None if request.reference is None else read_saved_reference(request.reference)
        found = prepare_verification(request.asked, run, tmp_path / "cache", tmp_path, saved)
        made.append(found.plan.cells[found.asked_cell])
        if request.save is not None:
            reference = found.plan.cells[found.reference_cell]
            write_record(run, reference, 0, samples={"0/answer_prompts": [0, 1]}, environment=None)
            save_reference(request.save, run, found.plan, {})
        return VerificationOutcome("agrees", ""), None, None

    monkeypatch.setattr(verify_table, "verified", verified)
    asked = VerificationSpec("", prompts=tmp_path / "p.jsonl", num_prompts=5, new_tokens=2, batch_size=2, positions=9)
    layouts = [Layout(), Layout(dp=2)]
    assert verify_table.run_table(["synthetic:llama-4m@0"], layouts, asked, tmp_path / "kept", as_json=False) == 0
    first, second = made
    assert first.workload == second.workload and [first.layout, second.layout] == layouts
    assert (first.workload.num_prompts, first.workload.new_tokens, first.workload.longest_tokens) == (2, 2, 7)


@pytest.mark.parametrize(
    ("activation", "reason"),
    [("tanh", "hidden_act 'tanh' is not implemented"), ("nonsense", "hidden_act 'nonsense' is not implemented")],
)
def test_a_model_that_cannot_run_has_its_reason_in_every_row(
    activation: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The reference runs first here; where it fails the candidate has no record."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tasks.checks.verification import VerificationSpec

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": activation}))
    asked = VerificationSpec("", num_prompts=2, new_tokens=2)
    capsys.readouterr()  # libraries speak when they are imported
    code = verify_table.run_table([str(tmp_path / "model")], [Layout()], asked, None, as_json=True)
    [row] = json.loads(capsys.readouterr().out)
    assert (code, row["verdict"]) == (2, "not supported") and reason in row["reason"], row


def test_how_far_a_defect_lies_off_is_written_out() -> None:
    row = verify_table.VerificationRow(
        "m", "decoder", "tp=2", "DEFECT", "", "KL mean", worst_times_noise=12345.6, limit_times_noise=4.0
    )
    assert verify_table._worst(row) == "12,000 (4): KL mean"


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(["tp=2"], marks=pytest.mark.slow), pytest.param(["tp=2", "pp=2"], marks=pytest.mark.nightly)],
)
def test_every_kind_of_model_agrees_on_two_ranks(layouts: list[str], tmp_path: Path) -> None:
    command = [RANKWISE, "verify", "--model", "synthetic:bert-1m@0", "--model", "synthetic:t5-1m@0"]
    command += [part for layout in layouts for part in ("--layout", layout)]
    command += ["--num-prompts", "5", "--new-tokens", "4"]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(done.stdout)
    assert [(row["kind"], row["layout"], row["verdict"]) for row in rows] == [
        (kind, layout, "agrees") for kind in ("encoder", "encoder_decoder") for layout in layouts
    ]
    for row in rows:
        assert 0 < row["difference"] < 4 * row["noise_difference"]
        assert row["worst"] and 0 < row["worst_times_noise"] < row["limit_times_noise"]
    # The reference of a model runs once.
    assert done.stderr.count("running transformers") == 2
