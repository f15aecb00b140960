"""A rank computes on its own GPU, or says why not: nothing turns to the CPU unasked. torch's devices are patched."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.common.execution import Layout
from configs.common.system.versions import version_of
from configs.plans.job import Job, Measurement
from configs.spec.cell import Cell
from configs.spec.engines import EngineEnvironment
from configs.spec.measuring import Measuring
from configs.targets.target import EndpointTarget, LocalTarget, SlurmTarget, SshTarget, Target
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from configs.workloads.serve import ServeWorkload
from configs.workloads.train import TrainWorkload
from engine.planner import accelerators
from engine.planner.accelerators import LocalAccelerator
from engine.rank.devices import claim_device
from engine.rank.joining import (
    DeviceError,
    choose_device,
    choose_job_device,
    engine_libraries,
    join_group,
    other_server,
)
from engine.rank.processes import RankPlace

A10G = LocalAccelerator(name="NVIDIA A10G")


def place(ranks: int = 1, rank: int = 0, **more: Any) -> RankPlace:
    return RankPlace(
        rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, allowed=[0], cores=[0], **more
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """So many GPUs for torch, of a compute capability; and those that the driver lists, whatever torch finds."""

    def there(torch_finds: int, listed: int | None = None, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_finds > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: torch_finds)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        known = SimpleNamespace(name="Tesla T4", major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
        found = (A10G,) * (torch_finds if listed is None else listed)
        for module in (accelerators, __import__("engine.rank.devices", fromlist=["devices"])):
            monkeypatch.setattr(module, "local_accelerators", lambda *_: found)

    return there


def job(target: Target, dtype: Any = "float32") -> Job:
    cell = Cell(workload=NoopWorkload(), dtype=dtype)
    return Job(
        name="j", study="s", measuring_pass="timed", measuring=Measuring(), target=target, ranks_per_node=1,
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),), timeout_seconds=9, inputs="i", cache="c",
    )  # fmt: skip


def test_each_rank_has_its_own_gpu(gpus: Any) -> None:
    gpus(2)
    device, backend = choose_device(place(2, rank=1))
    assert device == torch.device("cuda", 1)
    assert backend == ("nccl" if torch.distributed.is_nccl_available() else "gloo")


def test_more_ranks_than_gpus_are_refused_unless_cpu_is_said(gpus: Any) -> None:
    gpus(2)
    with pytest.raises(DeviceError, match=r"^device: 3 ranks on this node, but 2 GPUs\. Start one rank for each GPU"):
        choose_device(place(3))
    assert choose_device(place(3), "cpu") == (torch.device("cpu"), "gloo")


def test_gpus_that_torch_does_not_find_are_not_passed_over(gpus: Any) -> None:
    gpus(0, listed=2)
    with pytest.raises(DeviceError, match=r"^device: this node has 2 x NVIDIA A10G, but torch .* finds no GPU\."):
        choose_job_device(job(LocalTarget()), place())
    assert choose_job_device(job(LocalTarget(device="cpu")), place()) == (torch.device("cpu"), None)
    with pytest.raises(
        ValueError, match=r"^device: this machine has 2 x NVIDIA A10G, but torch .* or use device='cpu'"
    ):
        claim_device(None)
    assert claim_device("cpu").device == torch.device("cpu")
    gpus(0)
    assert choose_device(place()) == (torch.device("cpu"), None)
    assert claim_device(None).device == torch.device("cpu")


def test_a_cluster_that_was_asked_for_gpus_must_give_them(gpus: Any) -> None:
    gpus(0, listed=8)  # the driver lists GPUs that the scheduler gave to others
    with pytest.raises(DeviceError, match=r"^device: the target asks for GPUs, but torch .* finds no GPU"):
        choose_job_device(job(SlurmTarget(gpus_per_node=1)), place())
    assert choose_job_device(job(SlurmTarget()), place()) == (torch.device("cpu"), None)


def test_a_host_with_gpus_that_torch_does_not_find_is_refused(gpus: Any) -> None:
    """It computed on its cores without a word where the target did not name `gpus_per_node`, as a rented one's."""
    host = SshTarget.model_validate({"kind": "ssh", "hosts": ["a"]})
    gpus(0, listed=1)
    with pytest.raises(DeviceError, match=r"^device: this node has 1 x NVIDIA A10G, but torch .* finds no GPU\."):
        choose_job_device(job(host), place())
    on_cores = host.model_copy(update={"device": "cpu"})
    assert choose_job_device(job(on_cores), place()) == (torch.device("cpu"), None)
    gpus(0)
    assert choose_job_device(job(host), place()) == (torch.device("cpu"), None)
    with pytest.raises(DeviceError, match="the target asks for GPUs"):
        choose_job_device(job(host.model_copy(update={"gpus_per_node": 1})), place())


def test_a_slice_is_the_only_device_of_its_rank(gpus: Any) -> None:
    gpus(1)
    assert choose_device(place(2, rank=1, own_device_only=True))[0] == torch.device("cuda", 0)


def test_ranks_on_slices_join_their_group_with_the_only_device_that_they_see(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank named cuda:1, of which a process that sees one slice knows nothing: invalid device ordinal."""
    gpus(1)
    told: list[Any] = []
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, device_id, **__: told.append(device_id))
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: told.append(device_ids))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for slices, device in ((True, 0), (False, 1)):
        join_group(place(2, rank=1, own_device_only=slices), "nccl", 60.0, None)()
        assert told == [torch.device("cuda", device), [device]]
        told.clear()


def test_bfloat16_needs_a_device_that_has_it(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1, capability=(7, 5))
    with pytest.raises(DeviceError, match=r"^dtype: Tesla T4 has compute capability 7\.5, and bfloat16 requires 8\.0"):
        choose_job_device(job(LocalTarget(), "bfloat16"), place())
    assert choose_job_device(job(LocalTarget(), "float16"), place())[0] == torch.device("cuda", 0)
    assert choose_job_device(job(LocalTarget(device="cpu"), "bfloat16"), place())[0] == torch.device("cpu")
    gpus(1, capability=(8, 0))
    assert choose_job_device(job(LocalTarget(), "bfloat16"), place())[0] == torch.device("cuda", 0)
    gpus(1, capability=(7, 5))
    monkeypatch.setattr(torch.version, "hip", "7.1")  # AMD counts capabilities otherwise, and has it from CDNA 1 on
    assert choose_job_device(job(LocalTarget(), "bfloat16"), place())[0] == torch.device("cuda", 0)


def serving(target: Target, engine: Any, **fields: Any) -> Job:
    cell = Cell(model="m", workload=ServeWorkload(rate=1, max_requests=20), engine=engine)
    measured = (Measurement(cell=cell, repeat=0, attempt=1),)
    return job(target).model_copy(update={"measurements": measured, **fields})


def test_a_record_says_which_server_of_others_was_measured(tmp_path: Path) -> None:
    """`rankwise compare` said of two versions of vLLM, or two endpoints, that the environment was the same."""
    python = tmp_path / "bin" / "python"
    (tmp_path / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0.dist-info").mkdir(parents=True)
    python.parent.mkdir()
    python.touch()
    engines = {"vllm": EngineEnvironment(python=str(python))}
    assert other_server(serving(LocalTarget(), "vllm", engines=engines)) == {"servers": {"vllm": "vllm 0.32.0"}}
    assert other_server(serving(LocalTarget(), "vllm", cache=str(tmp_path))) == {}, "none is installed"
    assert other_server(serving(LocalTarget(), "rankwise")) == {} == other_server(job(LocalTarget()))
    there = EndpointTarget(url="http://10.0.0.5:8000", model="llama-8b")
    said = {"servers": {"endpoint": "llama-8b at http://10.0.0.5:8000"}}
    assert other_server(serving(there, "endpoint")) == said


@pytest.mark.parametrize(
    ("engine", "workload", "layout", "config", "expected"),
    [
        ("transformers", GenerateWorkload(), Layout(), {}, {"transformers"}),
        ("deepspeed", GenerateWorkload(), Layout(tp=2), {}, {"deepspeed", "transformers"}),
        ("onnxruntime", GenerateWorkload(), Layout(), {}, {"onnxruntime", "transformers"}),
        ("rankwise", GenerateWorkload(), Layout(tp=2), {}, set()),
        ("rankwise", TrainWorkload(), Layout(dp=2, strategy="ddp"), {"model_type": "llama"}, set()),
        ("rankwise", TrainWorkload(), Layout(dp=2, strategy="zero2"), {"model_type": "llama"}, {"deepspeed"}),
        ("rankwise", TrainWorkload(), Layout(), {"model_type": "gpt2"}, {"transformers"}),
    ],
)
def test_a_record_says_the_versions_of_the_libraries_that_were_measured(
    engine: Any, workload: Any, layout: Layout, config: dict[str, Any], expected: set[str]
) -> None:
    """After an upgrade of transformers `rankwise compare` said of its cells that the environment was the same."""
    cell = Cell(model="m", workload=workload, engine=engine, layout=layout)
    context: Any = SimpleNamespace(job=SimpleNamespace(cell=cell), manifest=SimpleNamespace(config=config))
    libraries = engine_libraries(context).get("libraries", {})
    assert libraries == {name: version_of(name) for name in expected} and None not in libraries.values()
