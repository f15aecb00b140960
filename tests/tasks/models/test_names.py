"""Names of models that the planner knows work in a study: resolved once, and pinned by the plan."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from configs.plans.plan import Plan, PlannedModel
from configs.spec.measuring import Measuring
from configs.spec.study import ModelSpec, StudyError, parse_study
from engine.planner.catalog import known_models, model_names, repository_of
from flows.cli.plan.planned_study import planned
from flows.precheck import check_study
from tasks.models.sources import full_name, hub_repository, resolve_model
from tasks.planning.study_models import planned_model, resolved_note, revision_of
from tests.support.servers.hub_server import Fault, HubServer, Repository, make_model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serves two repositories of the catalog and one that is not in it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = make_model(tmp_path / "served")
    names = ("google-bert/bert-base-uncased", "google-t5/t5-small", "acme/tiny")
    with HubServer({name: Repository(folder) for name in names}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        huggingface_hub.close_session()


def empty_plan_of(model: PlannedModel) -> Plan:
    return Plan(
        study="s", models=(model,), targets=(), measuring=Measuring(), pack=True, experiments=(), cells={}, repeats={}
    )


def study(model: str, **changes: Any) -> dict[str, Any]:
    return {
        "study": "s",
        "models": [{"id": model}],
        "workload": {"kind": "generate", "new_tokens": 4},
        "experiments": {"one": {"kind": "sweep", "over": {"batch_size": [1]}}},
    } | changes


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("t5-small", "google-t5/t5-small"),
        ("acme/tiny", "acme/tiny"),
    ],
)
def test_a_known_name_is_fetched_and_pinned(tmp_path: Path, hub: HubServer, name: str, repository: str) -> None:
    commit = Repository(tmp_path / "served").commit
    spec = ModelSpec(id=name)
    model = planned_model(spec, 0, tmp_path / "cache", tmp_path)
    assert model.identity == f"{repository}@{commit}" and Path(model.manifest).is_file()
    assert model.name == name.rpartition("/")[2]
    assert resolved_note(spec, model) == f"model {name} is {repository}@{commit}"
    assert resolved_note(ModelSpec(id=repository, revision=commit), model) is None


def test_a_resumed_study_keeps_the_commit_of_its_plan(tmp_path: Path, hub: HubServer) -> None:
    spec, cache = ModelSpec(id="bert-base-uncased"), tmp_path / "cache"
    first = planned_model(spec, 0, cache, tmp_path)
    (tmp_path / "served" / "config.json").write_text('{"model_type": "llama", "moved": true}')
    before = empty_plan_of(first)
    hub.requests.clear()
    hub.add_fault(Fault(".", 99, status=503))
    assert planned_model(spec, 0, cache, tmp_path, before) == first
    assert hub.requests == []
    assert revision_of(spec, tmp_path, before) == first.identity.rpartition("@")[2]
    assert revision_of(ModelSpec(id="t5-small"), tmp_path, before) is None
    assert revision_of(ModelSpec(id="bert-base-uncased", revision="v2"), tmp_path, before) == "v2"


@pytest.mark.parametrize("name", ["bert-base-uncased", "t5-small", "openlm-research/open_llama_3b"])
def test_a_study_is_checked_and_planned_by_name_without_a_network(tmp_path: Path, name: str) -> None:
    kind = {"bert-base-uncased": {"kind": "encode"}, "t5-small": {"kind": "seq2seq", "new_tokens": 4}}
    spec = parse_study(study(name, **({"workload": kind[name]} if name in kind else {})))
    repository = repository_of(name) or name
    plan = check_study(spec, tmp_path, tmp_path / "cache", tmp_path / "runs" / "s")
    assert {cell.model for cell in plan.cells.values()} == {f"{repository}@main"}
    said = planned(spec, tmp_path, tmp_path / "cache")
    assert all(each.throughput for each in said.plan.predictions.values())


def test_a_size_of_the_planner_has_random_weights(tmp_path: Path) -> None:
    spec = ModelSpec(id="llama-1m")
    model = planned_model(spec, 0, tmp_path, tmp_path)
    assert model.identity == "synthetic:llama-1m@0"
    assert resolved_note(spec, model) == "model llama-1m is synthetic:llama-1m@0, random weights"


def test_every_name_of_the_planner_has_a_repository_of_its_own() -> None:
    assert all(repository_of(name) for name in model_names())
    repositories = [model.repository for model in known_models()]
    assert len(set(repositories)) == len(repositories)
    # These names are aliases of a model of the same shape with other weights.
    assert repository_of("deepseek-r1") == "deepseek-ai/DeepSeek-R1"
    assert repository_of("openllama-v2-3b") == "openlm-research/open_llama_3b_v2"
    assert repository_of("google-bert/bert-base-uncased") is None and repository_of("no-model") is None


def test_a_folder_comes_first_and_a_missing_one_is_not_asked_of_the_hub(tmp_path: Path) -> None:
    make_model(tmp_path / "bert-base-uncased")
    assert full_name("bert-base-uncased", tmp_path) == "bert-base-uncased"
    make_model(tmp_path / "models" / "tiny")
    assert hub_repository("models/tny", None, tmp_path) is None
    assert hub_repository("models/tny", "main", tmp_path) == "models/tny"
    with pytest.raises(ValueError, match=r"models/tny: no such folder \(did you mean models/tiny\?\); for a Hugging"):
        resolve_model("models/tny", None, tmp_path / "cache", tmp_path)
    with pytest.raises(StudyError, match=r"models\[0\].id: no-such: no such folder; expected `synthetic"):
        planned_model(ModelSpec(id="no-such"), 0, tmp_path / "cache", tmp_path)
