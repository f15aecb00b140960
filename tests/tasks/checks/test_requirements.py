"""What a study needs beside cores and memory is checked before anything is started."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelFile, ModelManifest
from configs.plans.plan import Plan
from configs.spec.study import StudyError, parse_study
from flows.precheck import check_study
from tasks.checks import requirements

STUDY: dict[str, Any] = {
    "study": "s",
    "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
    "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "num_prompts": 4},
    "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}}},
}
TRAINED = {"batch": {"kind": "sweep", "over": {"global_batch_size": [4, 8]}}}


def checked(tmp_path: Path, **changes: Any) -> Plan:
    return check_study(parse_study(STUDY | changes), tmp_path, tmp_path / "cache", tmp_path / "run")


def problems(tmp_path: Path, **changes: Any) -> list[str]:
    with pytest.raises(StudyError) as caught:
        checked(tmp_path, **changes)
    return caught.value.problems


def test_an_unknown_machine_is_refused_unless_the_user_prices_it(tmp_path: Path) -> None:
    machine = {"kind": "local", "machine": "aws/nonexistent"}
    [problem] = problems(tmp_path, targets=[machine])
    assert problem.startswith("targets[0].machine: unknown instance 'aws/nonexistent'; known: aws/")
    assert checked(tmp_path, targets=[machine | {"price_usd_per_hour": 2.0}]).cells
    assert checked(tmp_path, targets=[machine | {"machine": "aws/p4d.24xlarge/us-east-1"}]).cells


def test_more_gpus_than_the_named_machine_has_are_refused(tmp_path: Path) -> None:
    target = {"kind": "slurm", "machine": "aws/g5.12xlarge", "gpus_per_node": 4}
    assert checked(tmp_path, targets=[target]).cells
    for machine, held in (("aws/g5.12xlarge", 4), ("aws/c7i.4xlarge", 0)):
        [problem] = problems(tmp_path, targets=[target | {"machine": machine, "gpus_per_node": 8}])
        assert problem == f"targets[0].gpus_per_node: got 8, but {machine} has {held}. Correct one of them"


def test_nothing_is_rented_for_cells_that_its_gpus_refuse(tmp_path: Path) -> None:
    """A T4 was rented for a study in bfloat16 alone, and each of its cells was `unsupported`."""
    target = {"kind": "aws", "instance": "g4dn.xlarge", "regions": ["us-east-1"]}
    [problem] = problems(tmp_path, targets=[target], dtype="bfloat16")
    assert (
        problem.startswith("targets[0].instance: g4dn.xlarge has NVIDIA T4") and "does not multiply bfloat16" in problem
    )
    assert checked(tmp_path, targets=[target], dtype="float16").cells
    assert checked(tmp_path, targets=[target | {"device": "cpu"}], dtype="bfloat16").cells
    (tmp_path / "train.py").write_text("print('step 1')")
    own = {"kind": "script", "command": ["train.py"], "inputs": ["train.py"], "measure": "wall", "items_per_step": 1,
           "unit": "run"}  # fmt: skip
    repeats = {"repeats": {"kind": "sweep", "over": {"cores_per_rank": [1]}}}
    script = {"targets": [target], "models": [], "workload": own, "experiments": repeats}
    assert checked(tmp_path, **script, dtype="bfloat16").cells
    assert checked(tmp_path, targets=[target | {"instance": "g5.xlarge"}], dtype="bfloat16").cells


def test_nothing_is_rented_for_more_ranks_than_its_gpus(tmp_path: Path) -> None:
    """Such nodes were rented, and each of the cells was `unsupported`."""
    target = {"kind": "aws", "instance": "g5.xlarge", "regions": ["us-east-1"], "ranks_per_node": 4}
    work = {"targets": [target], "experiments": {"tp": {"kind": "sweep", "over": {"tp": [1, 4]}}}}
    [problem] = problems(tmp_path, **work)
    assert problem == (
        "targets[0].ranks_per_node: 4 ranks of a cell are on one node, but g5.xlarge has 1 GPU, one for each rank. Use "
        "at most 1, or set `device: cpu` to measure on the cores"
    )
    for changes in ({"device": "cpu"}, {"instance": "g5.12xlarge"}, {"instance": "c7i.4xlarge"}):
        assert checked(tmp_path, **work | {"targets": [target | changes]}).cells
    spread = target | {"nodes": 4, "ranks_per_node": 1}
    assert checked(tmp_path, **work | {"targets": [spread]}).cells


def test_nothing_is_rented_with_fewer_cores_than_its_ranks_take(tmp_path: Path) -> None:
    """As of hosts by SSH; ranks that shared cores were measured on rented nodes without a word."""
    target = {"kind": "gcp", "instance": "c3-standard-4", "regions": ["us-central1"], "ranks_per_node": 4}
    work = {"targets": [target], "experiments": {"dp": {"kind": "sweep", "over": {"dp": [1, 4]}}}}
    assert checked(tmp_path, **work).cells
    wide = work | {"targets": [target | {"cores_per_rank": 2}]}
    assert problems(tmp_path, **wide) == [
        "targets[0].instance: 8 cores needed, c3-standard-4 has 4. Lower ranks_per_node or cores_per_rank, or use "
        "another instance"
    ]
    assert checked(tmp_path, **wide | {"targets": [target | {"cores_per_rank": 2, "instance": "c3-standard-8"}]}).cells


def test_nothing_is_rented_with_a_disk_that_does_not_hold_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 140 GB filled the root disk of 100, after it had been sent to each node."""
    target = {"kind": "aws", "instance": "p4d.24xlarge", "regions": ["us-east-1"]}
    plan = checked(tmp_path, targets=[target, {"kind": "local"}])
    files = {"model.safetensors": ModelFile(sha256="0", size_bytes=131 << 30)}
    manifest = ModelManifest(identity=plan.models[0].identity, source="folder", folder="f", files=files, config={})
    monkeypatch.setattr(requirements, "read_model_manifest", lambda path: manifest)
    assert list(requirements._small_disks(plan)) == [
        "targets[0].disk_gb: got 100, but the models have 131 GiB. Set as much and room for the image and its libraries"
    ]
    large = plan.targets[0].model_copy(update={"disk_gb": 200})
    assert not list(requirements._small_disks(plan.model_copy(update={"targets": (large, plan.targets[1])})))


def test_nothing_is_rented_where_its_cloud_ends_it_before_one_launch_has_measured(tmp_path: Path) -> None:
    """Google fixes a machine's end: a ladder of loads on one server was cut each time, however often it was run."""
    target = {"kind": "gcp", "instance": "n1-standard-8", "regions": ["us-central1"]}
    served = {"kind": "serve", "new_tokens": 4, "rate": 1, "duration_seconds": 1800}
    loads = {"loads": {"kind": "load", "over": {"rate": [1, 2, 4, 8, 16]}}}
    work = {"workload": served, "experiments": loads}
    told = (
        "targets[0].lease_hours: got 1, with which gcp ends its nodes after 2 h however long the run goes on, but one "
        "launch measures 5 cells for at least 2.5 h. "
    )
    [problem] = problems(tmp_path, **work, targets=[target])
    assert problem == f"{told}Set it to 2 or more, or `pack: false` for a launch of each cell, or measure for less time"
    assert checked(tmp_path, **work, targets=[target | {"lease_hours": 2}]).cells
    assert checked(tmp_path, **work, targets=[target], pack=False).cells
    elsewhere = {"kind": "aws", "instance": "c7i.4xlarge", "regions": ["us-east-1"]}
    assert checked(tmp_path, **work, targets=[elsewhere]).cells, "there the run extends the lease as long as it lives"
    days = work | {"workload": served | {"duration_seconds": 86_400}}
    [problem] = problems(tmp_path, **days, targets=[target | {"lease_hours": 24}])
    assert "ends its nodes after 48 h" in problem and "120 h. At most 24 is allowed, or `pack: false`" in problem


def test_tokens_beyond_the_models_positions_are_refused_with_both_numbers(tmp_path: Path) -> None:
    limit = int(ARCHITECTURES["llama-1m"]["max_position_embeddings"])
    work = STUDY["workload"]
    assert checked(tmp_path, workload=work | {"new_tokens": limit - 8}).cells
    assert problems(tmp_path, workload=work | {"new_tokens": limit - 7}) == [
        f"workload.new_tokens: 8 prompt tokens with {limit - 7} new ones take {limit + 1} positions, "
        f"but model m has {limit}"
    ]
    [problem] = problems(tmp_path, workload=work | {"prompt_tokens": 2 * limit})
    assert problem.startswith("workload.prompt_tokens: ")


def test_random_prompts_without_a_length_count_with_their_default(tmp_path: Path) -> None:
    """They counted as one token: a study was valid, and each of its measurements failed."""
    limit = int(ARCHITECTURES["llama-1m"]["max_position_embeddings"])
    work = {"kind": "generate", "num_prompts": 4}
    assert checked(tmp_path, workload=work | {"new_tokens": limit - 32}).cells
    assert problems(tmp_path, workload=work | {"new_tokens": limit - 31}) == [
        f"workload.new_tokens: 32 prompt tokens with {limit - 31} new ones take {limit + 1} positions, "
        f"but model m has {limit}"
    ]


def test_sequences_of_a_server_and_of_training_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    limit = int(ARCHITECTURES["llama-1m"]["max_position_embeddings"])
    serve = {"kind": "serve", "prompt_tokens": 8}
    load: dict[str, Any] = {"experiments": {"load": {"kind": "load", "rate": 1}}}
    assert checked(tmp_path, workload=serve | {"new_tokens": limit - 8}, **load).cells
    assert problems(tmp_path, workload=serve | {"new_tokens": limit - 7}, **load) == [
        f"workload.new_tokens: a sequence takes up to {limit + 1} positions, but model m has {limit}"
    ]
    [problem] = problems(tmp_path, workload=serve | {"new_tokens": 8, "max_length": 2 * limit}, **load)
    assert problem.startswith("workload.max_length: ")
    assert checked(tmp_path, workload=serve | {"new_tokens": limit - 7}, engine="vllm", **load).cells
    train = {"kind": "train", "steps": 3}
    assert checked(tmp_path, workload=train | {"sequence_length": limit}, experiments=TRAINED).cells
    assert problems(tmp_path, workload=train | {"sequence_length": limit + 1}, experiments=TRAINED) == [
        f"workload.sequence_length: a sequence takes {limit + 1} positions, but model m has {limit}"
    ]


def test_a_model_whose_positions_are_distances_takes_sequences_of_any_length(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "vocab_size": 60}
    bloom = sizes | {"model_type": "bloom", "n_layer": 1, "n_head": 4, "seq_length": 16}
    falcon = sizes | {"model_type": "falcon", "num_hidden_layers": 1, "num_attention_heads": 4}
    falcon |= {"max_position_embeddings": 16}
    planned = checked(tmp_path).models[0].model_copy(update={"manifest": str(tmp_path / "m.json")})
    for config, limits in ((bloom, (None, None)), (falcon | {"alibi": True}, (None, None)), (falcon, (16, 16))):
        manifest = ModelManifest(identity="folder:0", source="folder", folder="f", files={}, config=config)
        (tmp_path / "m.json").write_text(manifest.model_dump_json())
        assert requirements._limits(planned) == limits


def test_a_cold_load_of_a_synthetic_model_is_refused(tmp_path: Path) -> None:
    """Its points were measured like warm ones, and compared with them as if they differed."""

    def over(**values: list[str]) -> dict[str, Any]:
        return {"experiments": {"load": {"kind": "sweep", "over": values}}}

    assert problems(tmp_path, **over(page_cache=["cold", "warm"])) == [
        "page_cache: cold has no effect on model m, which is synthetic: engine rankwise reads it from no file. "
        "Leave it out, or use a model in files"
    ]
    assert checked(tmp_path, **over(page_cache=["warm"])).cells
    assert checked(tmp_path, **over(page_cache=["cold"], engine=["transformers"])).cells, "it reads a written copy"


def test_objectives_whose_figure_no_cell_has_are_refused(tmp_path: Path) -> None:
    """They were left out of the report, whose decision did not heed them."""
    load = {"workload": {"kind": "serve"}, "experiments": {"load": {"kind": "load", "rate": 1}}}
    assert problems(tmp_path, **load, objectives={"p99_ttft_seconds": 0.5}) == [
        "objectives.p99_ttft_seconds: no cell of the study (serve) has this figure, only those of generate, seq2seq. "
        "Leave it out. Bounds on the requests of a server are `workload.objectives`"
    ]
    train = {"workload": {"kind": "train", "steps": 3}, "experiments": TRAINED}
    wrong = {"embeddings_per_second": 10, "p99_itl_seconds": 1, "speedup": 2}
    found = problems(tmp_path, **train, objectives=wrong | {"p99_latency_seconds": 1})
    assert [problem.partition(":")[0] for problem in found] == [
        "objectives.p99_itl_seconds", "objectives.embeddings_per_second", "objectives.speedup",
    ]  # fmt: skip
    assert found[1].endswith("only those of encode. Leave it out")
    own = {"speedup": 2, "p99_ttft_seconds": 1, "usd_per_million_tokens": 1, "exposed_communication_share": 0.5}
    assert checked(tmp_path, objectives=own, experiments={"strong": {"kind": "strong", "grow": "tp", "to": 2}}).cells


def test_live_streams_need_a_cell_that_trains(tmp_path: Path) -> None:
    assert problems(tmp_path, measuring={"live": ["tensorboard"]}) == [
        "measuring.live: only training measurements are streamed, and no cell trains. Leave live out"
    ]
    training = {"kind": "train", "global_batch_size": 4, "sequence_length": 8, "steps": 2}
    experiments = {"batch": {"kind": "sweep", "over": {"global_batch_size": [4, 8]}}}
    changes = {"workload": training, "experiments": experiments, "measuring": {"live": ["tensorboard"]}}
    assert checked(tmp_path, **changes).cells


@pytest.mark.parametrize("rule", [{"profile": True}, {"profiler": "perf"}])
def test_a_profile_of_what_is_never_profiled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]
) -> None:
    """A study of a script with `profile: true` had no profile, and did not say so."""
    monkeypatch.setattr("tasks.checks.machine.why_not", lambda _: None)
    (tmp_path / "train.py").write_text("print('step 1')")
    script = {"kind": "script", "command": ["train.py"], "inputs": ["train.py"], "measure": "wall", "items_per_step": 1,
              "unit": "run"}  # fmt: skip
    repeats = {"repeats": {"kind": "sweep", "over": {"cores_per_rank": [1]}}}
    [name] = rule
    assert problems(tmp_path, models=[], workload=script, experiments=repeats, measuring=rule) == [
        f"measuring.{name}: only workloads of kind generate, seq2seq, encode, train are profiled. Leave {name} out"
    ]
    assert checked(tmp_path, measuring=rule).cells


def test_a_target_interval_and_a_port_that_nothing_heeds_are_refused(tmp_path: Path) -> None:
    load = {"workload": {"kind": "serve"}, "experiments": {"load": {"kind": "load", "rate": 1}}}
    [problem] = problems(tmp_path, **load, measuring={"target_interval": 0.05})
    assert problem.startswith("measuring.target_interval: no cell has a throughput")
    assert checked(tmp_path, measuring={"target_interval": 0.05}).cells
    [problem] = problems(tmp_path, measuring={"prometheus_port": 9500})
    assert problem.startswith("measuring.prometheus_port: has no effect without `live: [prometheus]`")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base": {"engine": "deepspeed", "tp": 2}}, "engine: deepspeed requires deepspeed, not installed here"),
        ({"base": {"engine": "transformers"}}, "engine: transformers requires transformers, not installed here"),
        ({"base": {"engine": "onnxruntime"}}, "engine: onnxruntime requires onnxruntime, not installed here"),
    ],
)
def test_a_library_of_an_engine_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    library = told.split("requires ")[1].split(",")[0]

    def find_spec(name: str) -> object:
        return None if name == library else importlib.util.find_spec(name)

    experiments = {"batch": STUDY["experiments"]["batch"] | changes}
    assert checked(tmp_path, experiments=experiments).cells
    monkeypatch.setattr(requirements, "find_spec", find_spec)
    assert any(problem.startswith(told) for problem in problems(tmp_path, experiments=experiments))


def test_zero_needs_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    training = {"kind": "train", "global_batch_size": 4, "sequence_length": 8, "steps": 2}
    experiments = {"s": {"kind": "sweep", "over": {"layout.strategy": ["zero2"], "layout.dp": [2]}}}
    told = problems(tmp_path, workload=training, experiments=experiments)
    assert "layout.strategy: zero2 requires deepspeed, not installed here: pip install deepspeed" in told


def _with_layers(folder: Path, layers: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES["llama-1m"] | {"num_hidden_layers": layers}))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder.name


def test_a_model_whose_files_are_at_fault_does_not_stop_the_others(tmp_path: Path) -> None:
    huge = {"id": _with_layers(tmp_path / "huge", 10**12)}
    plan = checked(tmp_path, models=[huge, *STUDY["models"]])
    assert len(plan.cells) == 2 and [model.name for model in plan.models] == ["m"]
    [unusable] = plan.unusable
    assert unusable.name == "huge"
    assert unusable.reason == (
        f"models[0].id: {tmp_path}/huge/config.json: num_hidden_layers: got 1000000000000, expected at most 10,000"
    )
    only = STUDY["experiments"]["batch"] | {"models": ["huge"]}
    plan = checked(tmp_path, models=[huge, *STUDY["models"]], experiments=STUDY["experiments"] | {"huge": only})
    assert [experiment.name for experiment in plan.experiments] == ["batch"]


def test_without_a_sound_model_or_with_a_wrong_name_nothing_is_planned(tmp_path: Path) -> None:
    huge = {"id": _with_layers(tmp_path / "huge", 1e12)}
    [problem] = problems(tmp_path, models=[huge])
    assert problem.startswith("models[0].id: ") and "num_hidden_layers" in problem
    told = problems(tmp_path, models=[huge, {"id": "nowhere"}, *STUDY["models"]])
    assert [problem[:12] for problem in told] == ["models[1].id", "models[0].id"]
