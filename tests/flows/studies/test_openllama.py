"""The OpenLLaMA studies that are shipped: what they ask, what is planned for them, and the Slurm job around one."""

import json
from pathlib import Path

import pytest

from benchmarks.long_prompts import VARIANTS, long_prompts
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.study import StudySpec, load_study
from engine.models.stages import stage_layers
from engine.planner.catalog import find_model
from flows.cli.plan.planned_study import planned
from flows.precheck import check_study
from tasks.bundle.write import write_bundle
from tests.support.run_folders.reports import whole_report
from tests.support.run_folders.studies import rankwise, write_study
from tests.support.servers.hub_server import HubServer, Repository
from tests.support.servers.openllama_model import make_openllama

STUDIES = Path(__file__).parents[3] / "configs" / "studies"
EXPERIMENTS = {
    "strong": "strong",
    "weak": "weak",
    "batch": "sweep",
    "delta": "optimization",
    "quantization": "compression",
    "correctness": "correctness",
}


def read(size: str) -> StudySpec:
    return load_study(STUDIES / f"openllama_{size}.yaml")


def checked(size: str, tmp_path: Path) -> Plan:
    return check_study(read(size), STUDIES, tmp_path / "cache", tmp_path / "run")


def layouts(plan: Plan, name: str) -> set[int]:
    (experiment,) = (each for each in plan.experiments if each.name == name)
    return {plan.cells[point.cell].layout.pp for point in experiment.points}


@pytest.mark.parametrize("size", ["cluster", "small"])
def test_both_studies_ask_the_same_of_one_and_two_stages(size: str, tmp_path: Path) -> None:
    study, plan = read(size), checked(size, tmp_path)
    assert {name: experiment.kind for name, experiment in study.experiments.items()} == EXPERIMENTS
    assert {experiment.name for experiment in plan.experiments if experiment.points} == set(EXPERIMENTS)
    assert layouts(plan, "strong") == layouts(plan, "weak") == layouts(plan, "correctness") == {1, 2}
    assert layouts(plan, "batch") == layouts(plan, "delta") == {2} and layouts(plan, "quantization") == {1}
    assert all(cell.layout.ranks == cell.layout.pp for cell in plan.cells.values()), "stages alone grow"
    assert plan.measuring.profile
    asked = [cell.workload for cell in plan.cells.values() if getattr(cell.workload, "noise_dtypes", ())]
    assert [work.num_prompts for work in asked] == [20]


def test_the_full_study_is_priced_without_the_model(tmp_path: Path) -> None:
    study = planned(read("cluster"), STUDIES, tmp_path)
    said = study.plan.predictions
    levels = {key for key, cell in study.plan.cells.items() if set(cell.compression) & {"balanced", "aggressive"}}
    peers = {key for key, cell in study.plan.cells.items() if cell.engine != "rankwise"}
    assert all(said[key].fits and said[key].usd_per_million_tokens for key in said.keys() - levels - peers)
    assert peers and all(said[key].reason and said[key].usd_per_million_tokens is None for key in peers)
    assert study.cost.usd and study.cost.usd > 0
    one, two = (
        said[point.cell] for point in next(each for each in study.plan.experiments if each.name == "strong").points
    )
    assert one.peak_memory_bytes and two.peak_memory_bytes and two.peak_memory_bytes < 0.6 * one.peak_memory_bytes


def test_the_scaled_model_is_cut_where_the_full_one_is() -> None:
    full, small = find_model("openlm-research/open_llama_3b_v2"), ModelConfig.parse(ARCHITECTURES["openllama-76m"])
    assert small.layers == full.layers == 26
    assert full.hidden == 8 * small.hidden and full.feed_forward == 8 * small.feed_forward
    assert small.head_dim == full.head_dim == 100
    assert stage_layers(small, 2) == [range(13), range(13, 26)]


def test_the_prompts_are_twenty_of_each_length() -> None:
    for text in (long_prompts(), (STUDIES / "prompts_2k_4k.jsonl").read_text()):
        prompts = [json.loads(line) for line in text.splitlines()]
        assert [len(prompt["prompt"]) for prompt in prompts] == [2000] * 20 + [4000] * 20
        assert [prompt["variant"] for prompt in prompts] == [name for name in VARIANTS for _ in range(20)]
        assert len({prompt["prompt"] for prompt in prompts}) == 40


def test_the_cluster_is_asked_for_two_nodes_with_a_gpu_each(tmp_path: Path) -> None:
    """The study as a folder for sbatch; random weights of the same shape stand for the model, token ids for texts."""
    prompts = tmp_path / "ids.jsonl"
    prompts.write_text("".join(f'{{"variant": "{name}", "tokens": [{n}]}}\n' for name in VARIANTS for n in range(20)))
    study = load_study(
        STUDIES / "openllama_cluster.yaml",
        [
            "models.0.id=synthetic:openllama-76m@0", "models.0.revision=null", "targets.0.partition=gpu",
            f"workload.prompts={prompts}",
        ],
    )  # fmt: skip
    written = write_bundle(study, STUDIES, tmp_path / "cache", tmp_path / "openllama", None)
    assert written.nodes == 2 and not written.large_models
    script = (tmp_path / "openllama" / "submit.sbatch").read_text()
    for option in ("nodes=2", "gpus-per-node=1", "cpus-per-task=8", "mem=30G", "time=240", "partition=gpu"):
        assert f"\n#SBATCH --{option}\n" in script
    assert "\nlaunch 1 " in script and "\nlaunch 2 " in script and "\nprofiled nsys 2 " in script
    asked = json.loads((tmp_path / "openllama" / "exp_config.json").read_text())
    assert set(asked["experiments"]) == set(EXPERIMENTS)
    assert len((tmp_path / "openllama" / "prompts.jsonl").read_text().splitlines()) == 40
    jobs = [Job.model_validate_json(path.read_bytes()) for path in (tmp_path / "openllama").glob("jobs/*/job.json")]
    assert {(job.cell.nodes, job.cell.layout.pp, job.ranks_per_node) for job in jobs} == {(1, 1, 1), (2, 2, 1)}
    assert {job.inputs for job in jobs} == {"../../inputs"}


@pytest.mark.nightly
def test_a_model_like_openllama_is_fetched_converted_measured_and_right(tmp_path: Path) -> None:
    """By name, without a revision: pickled weights and a sentencepiece model, as openlm-research/open_llama_3b has."""
    name = "openlm-research/open_llama_3b"
    make_openllama(tmp_path / "served")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Each   rank reads"}\n{"prompt": "A cell\\n  is"}\n')
    study = write_study(
        tmp_path,
        models=[{"id": name}],
        workload={"kind": "generate", "prompts": "prompts.jsonl", "new_tokens": 4, "batch_size": 2},
        experiments={
            "one": {"kind": "sweep", "over": {"batch_size": [2]}},
            "right": {"kind": "correctness", "prompts": 2, "new_tokens": 4, "layouts": [{"pp": 2}]},
        },
    )
    with HubServer({name: Repository(tmp_path / "served")}) as hub:
        commit = Repository(tmp_path / "served").commit
        environment = {"HF_ENDPOINT": hub.endpoint, "RANKWISE_CACHE": str(tmp_path / "cache"), "HF_TOKEN": ""}
        environment["HF_HUB_OFFLINE"] = "0"  # whatever this process's libraries were told
        done = rankwise("run", study, "--no-calibrate", cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"open_llama_3b ({name}@main)" in done.stdout
        assert f"note: model {name} is {name}@{commit}, pinned in plan.json" in done.stdout
        run = RunPaths(tmp_path / "runs" / "s")
        plan = Plan.model_validate_json(run.plan.read_bytes())
        assert [model.identity for model in plan.models] == [f"{name}@{commit}"]
        report = whole_report(run)
        # The branch moves on; the study does not.
        (tmp_path / "served" / "generation_config.json").write_text("{}")
        assert Repository(tmp_path / "served").commit != commit
        again = rankwise("run", study, "--no-calibrate", cwd=tmp_path, **environment)
    assert again.returncode == 0 and "were already completed" in again.stdout, again.stdout + again.stderr
    assert Plan.model_validate_json(run.plan.read_bytes()).models == plan.models
    assert "agree" in report or "equal" in report
