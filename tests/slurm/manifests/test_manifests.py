"""Manifests against the real schemas (hadolint, Compose specification, Kubernetes OpenAPI), and planted mistakes."""

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.common.execution import Layout
from configs.plans.model_manifest import ModelFile
from configs.serving.deployment import ServingBundle
from slurm.manifests.apptainer import bundle_definition
from slurm.manifests.compose import compose_of_server, compose_of_study
from slurm.manifests.dockerfile import dockerfile
from slurm.manifests.kubernetes import kubernetes_of_script, kubernetes_of_server, kubernetes_of_study
from slurm.manifests.serving import ContainedServer, dns_name

compose_spec = pytest.importorskip("compose_spec")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
KUBERNETES = "1.37"
SERVED = ContainedServer(
    name="tiny stdlib", model="/bundle/model", model_in_image=True, kind="decoder", tp=1, pp=1, dp=1, dtype="bfloat16",
    compression="int8", max_sequences=32, max_length=2048,
)  # fmt: skip
Mutation = Callable[[Any], None]


def problems_of_dockerfile(text: str) -> list[str]:
    if HADOLINT is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=600)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def problems_of_compose(data: dict[str, Any]) -> list[str]:
    """Of the specification; and names that nothing defines."""
    try:
        made = compose_spec.PyCompose.from_yaml(yaml.safe_dump(data, sort_keys=False))
        made.validate()
    except Exception as error:
        return [str(error)]
    return []


def problems_of_kubernetes(files: dict[str, Any]) -> list[str]:
    """Of the schemas; and what they do not see: selectors, names of ports, volumes and files that do not meet."""
    found = []
    for name, data in files.items():
        if name.startswith("base/") and not name.endswith("kustomization.yaml"):
            try:
                kubernetes_validate.validate(data, KUBERNETES, strict=True)
            except Exception as error:
                found.append(f"{name}: {error}")
    return found or references(files)


def references(files: dict[str, Any]) -> list[str]:
    found = []
    for folder in ("base", "overlays/cpu", "overlays/gpu"):
        kustomization = files[f"{folder}/kustomization.yaml"]
        named = [name for name in kustomization["resources"] if not name.startswith("..")]
        named += [patch["path"] for patch in kustomization.get("patches", [])]
        found += [f"{folder}: no file {name}" for name in named if f"{folder}/{name}" not in files]
    main = files.get("base/deployment.yaml") or files["base/job.yaml"]
    template = main["spec"]["template"]
    labels = template["metadata"]["labels"]
    selected = main["spec"].get("selector", {}).get("matchLabels", labels)
    if not selected.items() <= labels.items():
        found.append("the selector selects no pod of the template")
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    for container in template["spec"]["containers"]:
        ports = {port["name"] for port in container.get("ports", [])}
        probes = [container[name] for name in container if name.endswith("Probe")]
        found += [f"no port {p['httpGet']['port']}" for p in probes if p["httpGet"]["port"] not in ports]
        found += [f"no volume {m['name']}" for m in container["volumeMounts"] if m["name"] not in volumes]
        service = files.get("base/service.yaml")
        if service is not None and service["spec"].get("clusterIP") != "None":
            found += [f"no port {p['targetPort']}" for p in service["spec"]["ports"] if p["targetPort"] not in ports]
    scaler = files.get("base/autoscaler.yaml")
    if scaler is not None and scaler["spec"]["scaleTargetRef"]["name"] != main["metadata"]["name"]:
        found.append("the autoscaler scales nothing")
    patch = files["overlays/gpu/gpus.yaml"]
    if patch["metadata"]["name"] != main["metadata"]["name"]:
        found.append("the patch changes nothing")
    return found


@pytest.mark.parametrize("base", ["cpu", "cuda"])
@pytest.mark.parametrize("served", [SERVED, None], ids=["server", "study"])
def test_dockerfiles_have_no_findings(base: Any, served: ContainedServer | None) -> None:
    text = dockerfile(served, base)
    assert problems_of_dockerfile(text) == []
    assert "USER 10001" in text and ("HEALTHCHECK" in text) is (served is not None)


def test_compose_files_follow_the_specification() -> None:
    files = compose_of_server(SERVED.model_copy(update={"gpus": 1}))
    assert problems_of_compose(files["compose.yaml"]) == []
    assert problems_of_compose(compose_of_study("strong", 2, 1, gpus=1)["compose.yaml"]) == []
    mounted = [v.split(":")[0][2:] for v in files["compose.yaml"]["services"]["grafana"]["volumes"] if v[0] == "."]
    assert set(mounted) <= set(files)
    # Docker mounts them noexec: neither compiled kernels nor Triton's can be loaded from there.
    assert "/home/rankwise:exec" in files["compose.yaml"]["services"]["server"]["tmpfs"]
    queried = [t["expr"] for panel in files["grafana/serving.json"]["panels"] for t in panel["targets"]]
    assert len(queried) == len(set(queried)) > 10


def test_containers_of_a_study_have_gpus_of_their_own() -> None:
    """A count gave every container the first ones of the machine, so that two ranks shared one."""
    services = compose_of_study("strong", 2, 2, gpus=2)["compose.yaml"]["services"]
    devices = [each["deploy"]["resources"]["reservations"]["devices"][0] for each in services.values()]
    assert [each["device_ids"] for each in devices] == [["0", "1"], ["2", "3"]]
    assert not any("count" in each for each in devices)  # the specification takes one of the two


def test_the_user_of_an_image_may_write_the_run_folders() -> None:
    """A volume over a folder that the image lacks is root's."""
    lines = dockerfile(None, "cpu").splitlines()
    user, made, volume = (
        lines.index(line)
        for line in ("USER 10001:10001", "RUN mkdir /home/rankwise/runs", "VOLUME /home/rankwise/runs")
    )
    assert user < made < volume


def test_the_dashboard_asks_for_figures_that_the_server_has() -> None:
    import re

    from engine.serving.http.metrics import ServerMetrics
    from slurm.manifests.dashboard import serving_dashboard

    metrics = ServerMetrics("m")
    text = metrics.write().decode()
    asked = {
        name
        for panel in serving_dashboard()["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|rankwise):\w+", target["expr"])
    }
    known = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    base = {re.sub(r"_(bucket|total)$", "", name) for name in asked}
    assert base <= {re.sub(r"_total$", "", name) for name in known}


@pytest.mark.parametrize(
    "files",
    [
        kubernetes_of_server(SERVED, "registry/rankwise:1", replicas=2),
        kubernetes_of_script("strong", "registry/rankwise:1", 2, 1),
        kubernetes_of_study("strong", "registry/rankwise:1"),
    ],
    ids=["server", "script", "study"],
)
def test_kubernetes_files_follow_the_schemas(files: dict[str, Any]) -> None:
    assert problems_of_kubernetes(files) == []


@pytest.mark.parametrize(
    ("name", "slug"), [("7B chat", "model-7b-chat"), ("a" * 49 + " b", "a" * 49), ("模型", "model"), ("tiny", "tiny")]
)
def test_names_are_those_that_a_service_may_have(name: str, slug: str) -> None:
    assert SERVED.model_copy(update={"name": name}).slug == slug
    assert dns_name("2b_study", "study") == "study-2b-study" and dns_name("...", "study") == "study"


def test_a_model_that_is_named_like_a_device_keeps_its_name_on_gpus() -> None:
    files = kubernetes_of_server(SERVED.model_copy(update={"name": "cpu"}), "i:1")
    [patched] = files["overlays/gpu/gpus.yaml"]["spec"]["template"]["spec"]["containers"]
    assert patched["args"][3:5] == ["--name", "cpu"] and "--device" not in patched["args"]


def test_a_name_with_a_dollar_is_no_variable() -> None:
    served = SERVED.model_copy(update={"name": "7b $cheap"})
    compose = compose_of_server(served)["compose.yaml"]["services"]["server"]
    kubernetes = kubernetes_of_server(served, "i:1")
    [base] = kubernetes["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"]
    [patched] = kubernetes["overlays/gpu/gpus.yaml"]["spec"]["template"]["spec"]["containers"]
    for words in (compose["command"], base["args"], patched["args"]):
        assert words[words.index("--name") + 1] == "7b $$cheap"
    assert '"--name", "7b $cheap"' in dockerfile(served, "cpu")  # where nothing is replaced


def test_apptainer_runs_the_server() -> None:
    text = bundle_definition(SERVED)
    assert "model /bundle/model" in text
    assert "exec rankwise serve --model /bundle/model --name 'tiny stdlib'" in text
    assert '    exec rankwise "$@"' in bundle_definition(None)


DOCKER: dict[str, tuple[str, str]] = {
    "untagged base": ("python:3.11.13-slim-bookworm", "python"),
    "apt without yes": ("install --yes", "install"),
    "relative workdir": ("WORKDIR /home", "WORKDIR home"),
    "shell form": ('ENTRYPOINT ["rankwise"]', "ENTRYPOINT rankwise"),
}
COMPOSE: dict[str, Mutation] = {
    "restart": lambda c: c["services"]["server"].update(restart="sometimes"),
    "unknown field": lambda c: c["services"]["server"].update(cmmand="x"),
    "grace period": lambda c: c["services"]["server"].update(stop_grace_period="soon"),
}
KUBE: dict[str, Mutation] = {
    "misspelt probe": lambda f: f["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"][0].update(
        readinesProbe={}
    ),
    "replicas as text": lambda f: f["base/deployment.yaml"]["spec"].update(replicas="two"),
    "selector": lambda f: f["base/deployment.yaml"]["spec"]["selector"].update(matchLabels={"a": "b"}),
    "probe's port": lambda f: f["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"][
        "httpGet"
    ].update(port="web"),
    "no scaler's target": lambda f: f["base/autoscaler.yaml"]["spec"]["scaleTargetRef"].update(name="other"),
}


@pytest.mark.parametrize("name", DOCKER)
def test_planted_mistakes_in_dockerfiles_are_found(name: str) -> None:
    before, after = DOCKER[name]
    text = dockerfile(SERVED, "cpu")
    assert before in text
    assert problems_of_dockerfile(text.replace(before, after))


@pytest.mark.parametrize("name", COMPOSE)
def test_planted_mistakes_in_compose_are_found(name: str) -> None:
    data = copy.deepcopy(compose_of_server(SERVED)["compose.yaml"])
    COMPOSE[name](data)
    assert problems_of_compose(data)


@pytest.mark.parametrize("name", KUBE)
def test_planted_mistakes_in_kubernetes_files_are_found(name: str) -> None:
    files = copy.deepcopy(kubernetes_of_server(SERVED, "registry/rankwise:1"))
    KUBE[name](files)
    assert problems_of_kubernetes(files)


def test_a_server_whose_steps_take_long_is_given_its_time() -> None:
    assert "--group-timeout-seconds" not in SERVED.command
    bundle = ServingBundle(
        id="b", model="m", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={},
        group_timeout_seconds=90.0,
    )  # fmt: skip
    files = kubernetes_of_server(ContainedServer.of_bundle(bundle), "i:1")
    [base] = files["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"]
    assert base["args"][base["args"].index("--group-timeout-seconds") + 1] == "90"


def test_a_large_model_has_the_memory_that_its_weights_take() -> None:
    """Every server had at most 8 GiB."""
    bundle = ServingBundle(
        id="b", model="m", identity="folder:1", manifest="", kind="decoder",
        files={"model.safetensors": ModelFile(sha256="0", size_bytes=16 << 30)},
    )  # fmt: skip
    twice = bundle.model_copy(update={"layout": Layout(dp=2, tp=2)})  # each replica has weights of its own
    for made, limits in (
        (ContainedServer.of_bundle(bundle), ("18Gi", "40Gi")),
        (ContainedServer.of_bundle(twice), ("34Gi", "72Gi")),
        (SERVED, ("2Gi", "8Gi")),
    ):
        files = kubernetes_of_server(made, "i:1")
        [base] = files["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"]
        asked = base["resources"]
        assert (asked["requests"]["memory"], asked["limits"]["memory"]) == limits
