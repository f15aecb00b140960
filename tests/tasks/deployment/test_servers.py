"""Settings of a server on a place: its cache fits beside its weights, on a GPU into the GPU's memory."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.common.execution import Layout
from configs.serving.deployment import ServingBundle
from configs.serving.settings import ServingSettings
from configs.targets.target import LocalTarget, SshTarget
from engine.planner.families import read_architecture
from engine.planner.serving import block_bytes
from slurm.ssh.node_program import hello
from tasks.deployment import servers
from tasks.deployment.fit import free_memory_of_rank
from tasks.deployment.places import LocalPlace, SshPlace
from tasks.deployment.servers import ServerNotReady, ServerSpec, on_free_gpus, place_server, settings_of

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GIB = 1 << 30
WEIGHTS = 15 * GIB
BUNDLE = ServingBundle(
    id="b", model="llama-8b", identity="i", manifest="m", kind="decoder", files={}, max_sequences=32, max_length=2048
)


def place(memory: int, gpu: int | None) -> Any:
    def gpu_memory_bytes(first: int = 0, count: int | None = None) -> int | None:
        return gpu

    return SimpleNamespace(
        memory_bytes=lambda: memory, gpu_memory_bytes=gpu_memory_bytes, gpu_count=lambda: int(gpu is not None),
        cores=lambda: 16, name="lab",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "gpu", "device", "share", "room"),
    [
        (512 * GIB, 24 * GIB, None, 1, 24 * GIB),  # on the GPU, however much the host has
        (24 * GIB, None, None, 1, 24 * GIB),  # half of the memory is less than the weights leave
        (48 * GIB, 80 * GIB, "cpu", 2, 24 * GIB),
    ],
)
def test_a_cache_fits_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, memory: int, gpu: int | None, device: str | None, share: int, room: int
) -> None:
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    spec = ServerSpec("folder", "key", 4e9, device=device, share=share)
    settings = settings_of(place(memory, gpu), BUNDLE, spec, "manifest.json")
    one = block_bytes(read_architecture(CONFIG, "llama-8b"), Layout(), "bfloat16")
    assert 2 * GIB < settings.blocks * one < 0.9 * room - WEIGHTS
    # As `rankwise serve` chooses there: of 128 tokens, a prompt of 2,048 took a GPU sixteen steps.
    assert settings.max_step_tokens == (2048 if gpu is not None and device is None else 128)


def test_a_cache_takes_what_compressed_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 16 GiB a deployment in int8 had the blocks of a single sequence."""
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    spec, small = ServerSpec("folder", "key", 4e9), place(64 * GIB, 16 * GIB)
    assert settings_of(small, BUNDLE, spec, "manifest.json").blocks == 128
    compressed = BUNDLE.model_copy(update={"compression": ("int8",)})
    assert settings_of(small, compressed, spec, "manifest.json").blocks > 16 * 128


def test_a_server_without_room_beside_the_others_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout started it all the same, and the kernel could end the one that had the traffic."""
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    spec, cut = ServerSpec("folder", "key", 4e9), BUNDLE.model_copy(update={"layout": Layout(tp=2)})
    for room, bundle in (
        (place(14 * GIB, None), BUNDLE),
        (place(64 * GIB, 14 * GIB), BUNDLE),
        (place(14 * GIB, None), cut),
    ):
        with pytest.raises(ServerNotReady, match=r"lab: \d+\.00 GiB of memory are free for each rank .* about \d+"):
            settings_of(room, bundle, spec, "manifest.json")
    # Its weights in int8 have room, and so has the whole beside as many others as are told to share the machine.
    settings_of(place(14 * GIB, None), BUNDLE.model_copy(update={"compression": ("int8",)}), spec, "manifest.json")
    settings_of(place(20 * GIB, None), BUNDLE, replace(spec, share=3), "manifest.json")


def test_a_rank_has_a_gpu_to_itself() -> None:
    assert free_memory_of_rank(place(512 * GIB, 24 * GIB), None, 4) == 24 * GIB
    assert free_memory_of_rank(place(512 * GIB, 24 * GIB), "cpu", 4) == 128 * GIB
    assert free_memory_of_rank(place(512 * GIB, None), None, 4, machines=2) == 256 * GIB


@pytest.mark.parametrize(
    ("lines", "free"),
    [
        ("NVIDIA A10G, 570.1, 20480\nNVIDIA A10G, 570.1, 10240\n", 10 * GIB),
        ("NVIDIA GB200, 570.1, [N/A]\n", None),
        (None, None),
    ],
)
def test_a_host_tells_what_is_free_on_its_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str | None, free: int | None
) -> None:
    if lines is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf %b {json.dumps(lines)}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    host: Any = SshPlace.__new__(SshPlace)
    host._facts = SimpleNamespace(data=hello(str(tmp_path / "work")))
    assert host.gpu_memory_bytes() == free


@pytest.mark.parametrize(("told", "memory"), [({"available_bytes": 5}, 5), ({"available_bytes": None}, 8), ({}, 8)])
def test_what_others_have_of_a_hosts_memory_is_not_free(told: dict[str, int | None], memory: int) -> None:
    host: Any = SshPlace.__new__(SshPlace)
    host._facts = SimpleNamespace(data={"memory_bytes": 8, **told})
    assert host.memory_bytes() == memory


def test_a_host_tells_what_other_processes_leave(tmp_path: Path) -> None:
    data = hello(str(tmp_path))
    assert 0 < data["available_bytes"] < data["memory_bytes"]


def test_a_server_waits_for_long_steps_as_its_bundle_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    slow = BUNDLE.model_copy(update={"group_timeout_seconds": 90.0})
    made = [settings_of(place(64 * GIB, None), each, ServerSpec("folder", "key", 4e9), "m") for each in (BUNDLE, slow)]
    assert [settings.group_timeout_seconds for settings in made] == [20.0, 90.0]


def test_a_host_whose_clock_is_wrong_serves_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is hours ahead, as by its time zone, had expired when it began."""
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    monkeypatch.setattr(servers, "start_supervisor", lambda *_: None)
    ahead = LocalPlace(tmp_path, tmp_path)
    ahead.clock_seconds = 9 * 3600.0
    monkeypatch.setattr(LocalPlace, "memory_bytes", lambda _: 64 * GIB)
    place_server(ahead, BUNDLE, ServerSpec(str(tmp_path / "server"), "key", 1e9, device="cpu"), local=True)
    assert json.loads((tmp_path / "server" / "service.json").read_text())["expires_at"] == 1e9 + 9 * 3600


class MachineWithGpus(LocalPlace):
    """This machine, as if it had GPUs of which some memory is free; what lives in its folders is told."""

    def __init__(self, root: Path, free: list[int], living: dict[str, int | None]) -> None:
        super().__init__(root, root)
        self.free, self.living = free, living
        for folder, first in living.items():
            (root / folder).mkdir(parents=True)
            settings = ServingSettings(
                name="m", manifest="m", folder=folder, blocks=1, max_length=8, first_device=first
            )
            (root / folder / "settings.json").write_text(settings.model_dump_json())

    def gpu_memory_bytes(self, first: int = 0, count: int | None = None) -> int | None:
        return min(self.free[first : None if count is None else first + count])

    def gpu_count(self) -> int:
        return len(self.free)

    def gpu_variables(self, first: int, count: int) -> dict[str, str]:
        return {"GPUS": f"{count} from {first}"}


@pytest.mark.parametrize(
    ("tp", "living", "gone", "first"),
    [
        (1, {}, [], 0),
        (1, {"1": 0}, [], 1),
        (1, {"1": 0, "2": 1, "3": 2}, [], 3),
        (1, {"1": 0, "2": 1, "3": 2}, ["2"], 1),  # that one has ended
        (1, {"1": 0, "2": 1, "3": 2, "4": 3}, [], 0),  # as while another bundle takes their place
        (2, {"1": 0}, [], 2),
        (4, {"1": None}, [], None),
    ],
)
def test_servers_that_share_a_machine_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tp: int, living: dict[str, int | None], gone: list[str],
    first: int | None,
) -> None:  # fmt: skip
    """All computed on the first ones, while the others cost money; each had a part of the first one's memory."""
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    machine = MachineWithGpus(tmp_path, [80 * GIB] * 4, living)
    folders = {str(tmp_path / folder): folder for folder in living}
    monkeypatch.setattr(servers, "is_supervised", lambda _, folder: folders[folder] not in gone)
    for own in (living[folder] for folder in living if folder not in gone):
        machine.free[own or 0] = 24 * GIB  # what a server leaves
    bundle = BUNDLE.model_copy(update={"layout": Layout(tp=tp), "max_sequences": 4096})
    spec = ServerSpec("folder", "key", 4e9, share=4 // tp, beside=tuple(folders))
    settings = settings_of(machine, bundle, spec, "manifest.json")
    assert settings.first_device == first
    if first is not None and len(living) - len(gone) < 4 // tp:
        one = block_bytes(read_architecture(CONFIG, "llama-8b"), Layout(tp=tp), "bfloat16")
        assert settings.blocks * one > 35 * GIB, "of a GPU of its own"


def test_a_deployment_beside_others_takes_the_gpus_that_they_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second deployment on a machine knew nothing of the first: both were on the first GPU, where it did not fit."""
    monkeypatch.setattr(servers, "load_manifest", lambda _: SimpleNamespace(config=CONFIG, identity="llama-8b"))
    machine = MachineWithGpus(tmp_path, [8 * GIB, 79 * GIB, 80 * GIB, 8 * GIB], {})
    settings = settings_of(machine, BUNDLE, ServerSpec("folder", "key", 4e9), "manifest.json")
    assert settings.first_device == 1  # a GiB more or less is no reason to take another
    assert free_memory_of_rank(machine, None, 1) == 80 * GIB  # of the machine's least free GPU it did not fit
    assert [free_memory_of_rank(machine, None, 1, servers=count) for count in (2, 3, 9)] == [79 * GIB, 8 * GIB, 8 * GIB]
    assert free_memory_of_rank(machine, None, 2) == 8 * GIB  # of each pair one is nearly full
    assert free_memory_of_rank(machine, "cpu", 1) > 0


def test_what_is_measured_for_a_bundle_runs_on_free_gpus(tmp_path: Path) -> None:
    machine = MachineWithGpus(tmp_path, [8 * GIB, 80 * GIB, 80 * GIB, 80 * GIB], {})
    one = SshTarget.model_validate({"kind": "ssh", "hosts": ["a"], "env": {"OMP_NUM_THREADS": "2"}})
    assert on_free_gpus(LocalTarget(), machine, 1).env == {"GPUS": "1 from 1"}
    assert on_free_gpus(one, machine, 2).env == {"GPUS": "2 from 2", "OMP_NUM_THREADS": "2"}
    several = SshTarget.model_validate({"kind": "ssh", "hosts": ["a", "b"]})  # it may run on either
    for target, ranks in ((LocalTarget(device="cpu"), 1), (LocalTarget(), 4), (several, 1)):
        assert on_free_gpus(target, machine, ranks) is target
    named = LocalTarget(env={"GPUS": "mine"})
    assert on_free_gpus(named, machine, 1).env == {"GPUS": "mine"}


@pytest.mark.parametrize(
    ("names", "variables"),
    [
        (["NVIDIA A10G"] * 4, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,3"}),
        (["NVIDIA H100 MIG 1g.10gb"] * 4, {}),  # slices have no numbers
    ],
)
def test_gpus_of_a_host_are_left_by_their_numbers(names: list[str], variables: dict[str, str]) -> None:
    host: Any = SshPlace.__new__(SshPlace)
    host._facts = SimpleNamespace(data={"gpus": {"names": names}})
    assert host.gpu_variables(2, 2) == variables
