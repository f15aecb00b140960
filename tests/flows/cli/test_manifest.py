"""`rankwise manifest` of a study: names that Compose and Kubernetes take, and the GPUs that were asked for."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from configs.common.base import sha256_of_file
from configs.common.execution import Layout
from configs.plans.model_manifest import ModelFile, ModelManifest
from configs.serving.deployment import ServingBundle
from flows.cli.main import app
from slurm.manifests.serving import ContainedServer

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""RFC 1035: what the name of a Service must be."""
_PROJECT = re.compile(r"[a-z0-9][a-z0-9_-]*")
"""Compose specification: name."""


def written(tmp_path: Path, study: str, *words: str) -> dict[str, Any]:
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    experiments = {"one": {"kind": "sweep", "over": {"dtype": ["float32"]}}}
    told = {"study": study, "workload": {"kind": "noop"}, "experiments": experiments}
    path.write_text(yaml.safe_dump(told))
    kind, *options = words
    done = CliRunner().invoke(app, ["manifest", kind, str(path), "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return {str(each.relative_to(out)): yaml.safe_load(each.read_text()) for each in out.rglob("*.yaml")}


@pytest.mark.parametrize("study", ["7B_strong.v1.2", "a" * 49 + "-b", "Strong", "2026"])
def test_names_are_those_that_kubernetes_and_compose_take(study: str, tmp_path: Path) -> None:
    for place, nodes in enumerate(("1", "2")):
        folder = tmp_path / str(place)
        folder.mkdir()
        for name, content in written(folder, study, "k8s", "--nodes", nodes).items():
            if "metadata" in content:
                assert _LABEL.fullmatch(content["metadata"]["name"]), (name, content["metadata"])
    folder = tmp_path / "compose"
    folder.mkdir()
    assert _PROJECT.fullmatch(written(folder, study, "compose")["compose.yaml"]["name"])


def test_the_job_of_a_study_gets_the_gpus_that_were_asked_for(tmp_path: Path) -> None:
    patch = written(tmp_path, "strong", "k8s", "--gpus", "4")["overlays/gpu/gpus.yaml"]
    [container] = patch["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compose", "bundle.json", "--nodes", "2"), "--nodes: only for a study"),
        (("k8s", "bundle.json", "--nodes", "2"), "--nodes: only for a study"),
        (("k8s", "study.yaml", "--replicas", "1"), "--replicas: only for a bundle"),
        (("apptainer", "study.yaml", "--gpus", "1"), "--gpus: only for a bundle"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    bundle = ServingBundle(id="b", model="m", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={})
    (tmp_path / "bundle.json").write_text(bundle.model_dump_json())
    experiments = {"one": {"kind": "sweep", "over": {"dtype": ["float32"]}}}
    told = {"study": "s", "workload": {"kind": "noop"}, "experiments": experiments}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(told))
    kind, what, *options = words
    done = CliRunner().invoke(app, ["manifest", kind, str(tmp_path / what), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2 and said in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "slug"),
    [("7B-chat", "model-7b-chat"), ("a" * 49 + "-b", "a" * 49), ("Llama 3.1", "llama-3-1"), ("_", "model")],
)
def test_a_server_has_such_a_name_too(name: str, slug: str) -> None:
    served = ContainedServer(
        name=name, model="synthetic:llama-1m@0", model_in_image=False, kind="decoder", tp=1, pp=1, dp=1,
        dtype="float32", compression=None, max_sequences=4, max_length=None,
    )  # fmt: skip
    assert served.slug == slug


def test_a_token_is_read_by_its_owner_and_the_containers_alone(tmp_path: Path) -> None:
    """Containers have users of their own, so the file is open and its folder is not."""
    bundle = ServingBundle(id="b", model="1e3", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={})
    (tmp_path / "bundle.json").write_text(bundle.model_dump_json())
    out = tmp_path / "out"
    words = ["manifest", "compose", str(tmp_path / "bundle.json"), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert out.stat().st_mode & 0o077 == 0 and (out / "rankwise_key").stat().st_mode & 0o777 == 0o644
    assert "- '1e3'" in (out / "compose.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("study.yaml",), "configmap s-study --from-file=study.yaml={folder}/study.yaml"),
        (("study.yaml", "--nodes", "2"), "configmap s-script --from-file={folder}/out/train.py"),
        (("bundle.json",), "secret generic m-key --from-file=key=TOKEN_FILE"),
    ],
    ids=str,
)
def test_what_the_pods_wait_for_is_told(words: tuple[str, ...], needed: str, tmp_path: Path) -> None:
    """They wait for ever for a Secret or a ConfigMap that nobody has made."""
    bundle = ServingBundle(id="b", model="m", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={})
    (tmp_path / "bundle.json").write_text(bundle.model_dump_json())
    experiments = {"one": {"kind": "sweep", "over": {"dtype": ["float32"]}}}
    told = {"study": "s", "workload": {"kind": "noop"}, "experiments": experiments}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(told))
    what, *options = words
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["manifest", "k8s", str(tmp_path / what), "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    assert f"  next: kubectl create {needed.format(folder=tmp_path)}\n  next: kubectl apply -k" in done.output
    for name, content in {path.name: path.read_text() for path in out.glob("base/*.yaml")}.items():
        wanted = needed.split()[2 if needed.startswith("secret") else 1]
        assert name not in ("deployment.yaml", "job.yaml") or wanted in content


def test_commands_to_copy_hold_in_folders_with_spaces(tmp_path: Path) -> None:
    """A shell took `my study.yaml` for two words."""
    folder = tmp_path / "my work"
    folder.mkdir()
    experiments = {"one": {"kind": "sweep", "over": {"dtype": ["float32"]}}}
    told = {"study": "s", "workload": {"kind": "noop"}, "experiments": experiments}
    (folder / "my study.yaml").write_text(yaml.safe_dump(told))
    for kind, options in (("dockerfile", ()), ("compose", ()), ("k8s", ()), ("k8s", ("--nodes", "2"))):
        out = folder / f"{kind}{len(options)}"
        words = ["manifest", kind, str(folder / "my study.yaml"), "--out", str(out), *options]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        commands = [line.removeprefix("  next: ") for line in done.output.splitlines() if line.startswith("  next: ")]
        assert commands and all(any("/my work/" in word for word in shlex.split(command)) for command in commands)


def bundle_of_folder(tmp_path: Path) -> Path:
    """The file of a bundle whose weights lie in `weights`."""
    (tmp_path / "weights").mkdir()
    weights = tmp_path / "weights" / "model.safetensors"
    weights.write_bytes(b"weights")
    files = {"model.safetensors": ModelFile(sha256=sha256_of_file(weights), size_bytes=7)}
    manifest = ModelManifest(
        identity="folder:1", source="folder", folder=str(tmp_path / "weights"), files=files, config={}
    )
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    bundle = ServingBundle(
        id="b", model="m", identity="folder:1", manifest=str(tmp_path / "manifest.json"), kind="decoder", files=files
    )
    (tmp_path / "bundle.json").write_text(bundle.model_dump_json())
    return tmp_path / "bundle.json"


def test_an_apptainer_definition_has_the_model_beside_it(tmp_path: Path) -> None:
    """The definition copies a folder `model`, which nobody had written."""
    out = tmp_path / "clone" / "server.def"
    done = CliRunner().invoke(app, ["manifest", "apptainer", str(bundle_of_folder(tmp_path)), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "    model /bundle/model\n" in out.read_text()
    assert (out.parent / "model" / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("content", [b"trained", None], ids=["trained further", "removed"])
@pytest.mark.parametrize("kind", ["dockerfile", "compose", "apptainer"])
def test_an_image_has_the_weights_of_its_bundle(kind: str, content: bytes | None, tmp_path: Path) -> None:
    """A folder that was written anew since it was deployed went into the image, under the old weights' evidence."""
    bundle, weights = bundle_of_folder(tmp_path), tmp_path / "weights" / "model.safetensors"
    if content is None:
        weights.unlink()
    else:
        weights.write_bytes(content)
    out = tmp_path / "out" / ("server.def" if kind == "apptainer" else "")
    done = CliRunner().invoke(app, ["manifest", kind, str(bundle), "--out", str(out)])
    assert done.exit_code == 2, done.output
    problem = "missing" if content is None else "content changed"
    assert f"{weights}: {problem}; the bundle of m was measured with the file as it was" in done.output.replace(
        "\n", " "
    )
    assert not (tmp_path / "out").exists()


def test_a_server_with_more_ranks_than_gpus_is_refused(tmp_path: Path) -> None:
    """Its container ended with an error, again and again."""
    bundle = ServingBundle(
        id="b", model="m", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={}, layout=Layout(tp=2)
    )
    (tmp_path / "bundle.json").write_text(bundle.model_dump_json())
    for gpus, code in (("1", 2), ("2", 0), ("0", 0)):
        out = tmp_path / gpus
        words = ["manifest", "k8s", str(tmp_path / "bundle.json"), "--out", str(out), "--gpus", gpus]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == code, done.output
        assert ("--gpus: got 1, but m has 2 ranks, each on a GPU" in done.output) is (code == 2)
        assert out.exists() is (code == 0)


def job_of(folder: Path, **fields: Any) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and the volume of a study's Job; the study names prompts in a folder beside it."""
    (folder / "data").mkdir()
    (folder / "data" / "prompts.jsonl").write_text('{"id": 1, "tokens": [1, 2]}\n')
    told = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
        "workload": {"kind": "generate", "prompts": "data/prompts.jsonl", "new_tokens": 2},
        "experiments": {"one": {"kind": "sweep", "over": {"batch_size": [1]}}},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(told | fields))
    done = CliRunner().invoke(app, ["manifest", "k8s", str(folder / "study.yaml"), "--out", str(folder / "out")])
    job = folder / "out" / "base" / "job.yaml"
    spec = yaml.safe_load(job.read_text())["spec"]["template"]["spec"] if job.exists() else {}
    [volume] = [each for each in spec.get("volumes", ()) if each["name"] == "study"] or [{}]
    return done.exit_code, done.output, volume


def test_a_job_finds_the_files_that_its_study_names(tmp_path: Path) -> None:
    """The ConfigMap held the study alone, and the pod ended with `no such file`."""
    code, output, volume = job_of(tmp_path)
    assert code == 0, output
    items = {item["key"]: item["path"] for item in volume["configMap"]["items"]}
    assert items == {"study.yaml": "study.yaml", "1-data-prompts.jsonl": "data/prompts.jsonl"}
    [create] = [line.removeprefix("  next: ") for line in output.splitlines() if "create configmap" in line]
    given = dict(word.removeprefix("--from-file=").split("=") for word in shlex.split(create)[4:])
    assert given == {key: str(tmp_path / path) for key, path in items.items()}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"models": [{"id": "./llama", "name": "m"}]}, "models[0].id: ./llama is a folder of this machine"),
        ({"targets": [{"kind": "slurm", "name": "gpu", "partition": "gpu"}]}, "targets[0]: gpu: a Job measures on its"),
        (
            {"targets": [{"kind": "aws", "instance": "c7i.xlarge", "regions": ["us-east-1"]}]},
            "targets[0]: aws: a Job measures on its own node, and its image reaches no target of kind aws",
        ),
        (
            {"workload": {"kind": "generate", "prompts": "/data/p.jsonl"}},
            "/data/p.jsonl lies outside the folder of the",
        ),
        ({"workload": {"kind": "generate", "prompts": "none.jsonl"}}, "no such file: "),
    ],
    ids=["model", "target", "rented", "outside", "missing"],
)
def test_a_study_that_a_pod_could_not_run_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    code, output, _ = job_of(tmp_path, **fields)
    assert code == 2 and said in output and not (tmp_path / "out").exists()


def test_files_that_no_configmap_holds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text('{"id": 1, "tokens": [1]}\n' * 50_000)
    code, output, _ = job_of(tmp_path, workload={"kind": "generate", "prompts": "long.jsonl"})
    assert code == 2 and "and a ConfigMap holds 1,048,576" in output


def test_another_file_of_the_studys_name_does_not_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("not the study")
    (tmp_path / "mine.py").write_text("print()")
    told = {
        "study": "s",
        "workload": {"kind": "script", "command": ["mine.py"], "inputs": ["mine.py", "study.yaml", "gone.txt"]},
        "experiments": {"one": {"kind": "sweep", "over": {"dp": [1]}}},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(told))
    done = CliRunner().invoke(app, ["manifest", "k8s", str(tmp_path / "own.yaml"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "study.yaml is the study's own name in a Job" in done.output
    assert "no such file: " in done.output and "gone.txt" in done.output, "all problems at once"


def memory_of(folder: Path, **fields: Any) -> tuple[str, str, str]:
    """What is printed, and the request and the limit of memory of a study's Job."""
    told = {
        "study": "s",
        "models": [{"id": "Qwen/Qwen2.5-7B", "name": "m"}],
        "workload": {"kind": "generate", "prompt_tokens": 8, "num_prompts": 4, "new_tokens": 2},
        "experiments": {"one": {"kind": "sweep", "over": {"dtype": ["float32"]}}},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(told | fields))
    done = CliRunner().invoke(app, ["manifest", "k8s", str(folder / "study.yaml"), "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    spec = yaml.safe_load((folder / "out" / "base" / "job.yaml").read_text())["spec"]["template"]["spec"]
    asked = spec["containers"][0]["resources"]
    return done.output, asked["requests"]["memory"], asked["limits"]["memory"]


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({}, 30),  # 7.6 billion parameters in 4 bytes are 28 GiB
        ({"experiments": {"one": {"kind": "sweep", "over": {"engine": ["transformers"]}}}}, 30),  # by its weights
        ({"experiments": {"one": {"kind": "sweep", "over": {"layout.dp": [2]}}}}, 58),  # each replica has its own
        ({"models": [{"id": "synthetic:llama-1m@0", "name": "m"}]}, 4),
    ],
    ids=["large", "another engine", "two replicas", "tiny"],
)
def test_a_job_has_the_memory_that_its_study_takes(fields: dict[str, Any], least: int, tmp_path: Path) -> None:
    """Every study's Job was ended beyond 16 GiB, whatever its models."""
    output, request, limit = memory_of(tmp_path, **fields)
    assert "memory:" not in output
    asked, most = int(request.removesuffix("Gi")), int(limit.removesuffix("Gi"))
    assert least <= asked < least + 8 and most == max(16, 2 * asked + 4)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("somebody/unheard-of", "somebody/unheard-of: its size is not known to the planner"),
        ("synthetic:llama-9q@0", "models[0].id: unknown architecture 'llama-9q'"),
    ],
)
def test_a_job_says_whose_memory_is_not_counted(model: str, why: str, tmp_path: Path) -> None:
    output, request, limit = memory_of(tmp_path, models=[{"id": model, "name": "m"}])
    assert (request, limit) == ("4Gi", "16Gi")
    [line] = [line for line in output.splitlines() if line.startswith("  memory: ")]
    assert line.startswith(f"  memory: not all cells are counted ({why}") and line.endswith("in base/job.yaml")


def test_the_pods_of_a_script_have_memory_for_each_rank(tmp_path: Path) -> None:
    for gpus, asked in (("1", ("4Gi", "16Gi")), ("8", ("8Gi", "32Gi"))):
        (tmp_path / gpus).mkdir()
        job = written(tmp_path / gpus, "strong", "k8s", "--nodes", "2", "--gpus", gpus)["base/job.yaml"]
        resources = job["spec"]["template"]["spec"]["containers"][0]["resources"]
        assert (resources["requests"]["memory"], resources["limits"]["memory"]) == asked
