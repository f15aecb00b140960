"""GPUs and torch's builds in `rankwise doctor`: small programs on PATH print what the makers' tools print."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.doctor import gpus
from flows.cli.doctor.checks import DoctorCheck

# nvidia-smi 535 and later: --format=csv,noheader; -L of a divided GPU as in the MIG User Guide, "Getting Started".
NVIDIA_CSV = "NVIDIA A100-SXM4-40GB, 40960 MiB, {driver}"
NVIDIA_MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
  MIG 1g.5gb      Device  2: (UUID: MIG-1e11ac4a-4e3c-5e1f-8a39-9f3e6a4e6d3a)"""
# amd-smi static --asic --vram --driver --json: a list with ROCm 6, under gpu_data with ROCm 7 (rocm.docs.amd.com,
# AMD SMI CLI tool usage; AMD SMI changelog).
AMD_SMI = [
    {
        "gpu": index,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "target_graphics_version": "gfx942"},
        "driver": {"name": "amdgpu", "version": "6.10.5"},
        "vram": {"type": "HBM", "size": {"value": 196592, "unit": "MB"}},
    }
    for index in (0, 1)
]
# rocm-smi --showproductname --showmeminfo vram --showdriverversion --json of ROCm 6 (github.com/marimo-team/marimo,
# issue 9237, for the cards).
ROCM_SMI = {
    "card0": {
        "VRAM Total Memory (B)": "21458059264",
        "VRAM Total Used Memory (B)": "27856896",
        "Card Series": "Radeon RX 7900 XT",
        "Card Model": "0x744c",
        "GFX Version": "gfx1100",
    },
    "system": {"Driver version": "6.8.5"},
}
# xpu-smi 1.2, discovery -j (Intel XPU System Management Interface User Guide).
XPU_SMI = {
    "device_list": [
        {
            "device_function_type": "physical",
            "device_id": 0,
            "device_name": "Intel(R) Data Center GPU Max 1100",
            "device_type": "GPU",
            "drm_device": "/dev/dri/card1",
            "pci_bdf_address": "0000:29:00.0",
            "pci_device_id": "0xbda",
            "uuid": "00000000-0000-0029-0000-002f0bda8086",
            "vendor_name": "Intel(R) Corporation",
        }
    ]
}
TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
version = SimpleNamespace(cuda={cuda!r}, hip={hip!r}, xpu={xpu!r})
cuda = SimpleNamespace(
    is_available=lambda: bool({devices!r}), device_count=lambda: len({devices!r}),
    get_device_name=lambda index: {devices!r}[index], get_device_capability=lambda index: {capability!r},
    get_arch_list=lambda: {kernels!r}, nccl=SimpleNamespace(version=lambda: (2, 29, 7)),
)
xpu = SimpleNamespace(is_available=lambda: False)
backends = SimpleNamespace(mkldnn=SimpleNamespace(is_available=lambda: True))
ops = SimpleNamespace(mkldnn=SimpleNamespace(_is_mkldnn_bf16_supported=lambda: {bfloat16!r}))
"""
DISTRIBUTED = "".join(f"def {name}(): return True\n" for name in ("is_available", "is_gloo_available"))
DISTRIBUTED += "".join(f"def {name}(): return False\n" for name in ("is_nccl_available", "is_mpi_available"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with these tools: name -> what it prints, or a script that begins with #!."""

    def made(**printed: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for tool, text in printed.items():
            path = folder / tool.replace("_", "-")
            path.write_text(text if text.startswith("#!") else f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    monkeypatch.setenv("PATH", str(tmp_path))
    return made


def nvidia(driver: str = "570.86.15", count: int = 2, listing: str = "") -> str:
    line = NVIDIA_CSV.format(driver=driver)
    rows = "\n".join([line] * count)
    return (
        "#!/bin/sh\ncase \"$1\" in\n--query*) cat <<'END'\n" + rows + "\nEND\n;;\n"
        "-L) cat <<'END'\n" + listing + "\nEND\n;;\n*) echo 'GPU0 NV18';;\nesac\n"
    )


@pytest.fixture
def torch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch of another build."""

    def made(version: str, devices: tuple[str, ...] = (), capability: tuple[int, int] = (8, 0), **builds: Any) -> None:
        folder = tmp_path / "path" / "torch"
        folder.mkdir(parents=True, exist_ok=True)
        known: dict[str, Any] = {
            "cuda": None,
            "hip": None,
            "xpu": None,
            "kernels": ["sm_80", "sm_90"],
            "bfloat16": True,
        }
        known |= builds
        text = TORCH.format(version=version, devices=list(devices), capability=capability, **known)
        (folder / "__init__.py").write_text(text)
        (folder / "distributed.py").write_text(DISTRIBUTED)
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))

    return made


def only(found: list[DoctorCheck], name: str) -> DoctorCheck:
    (check,) = [check for check in found if check.name == name]
    return check


def test_machines_without_tools(machine: Any) -> None:
    found = [*gpus.check_nvidia(), *gpus.check_amd(), *gpus.check_intel()]
    assert [(check.name, check.state) for check in found] == [
        ("gpu nvidia", "missing"), ("gpu amd", "missing"), ("gpu intel", "missing")
    ]  # fmt: skip


def test_nvidia(machine: Any) -> None:
    machine(nvidia_smi=nvidia())
    found = gpus.check_nvidia()
    each = "NVIDIA A100-SXM4-40GB, 40960 MiB"
    assert only(found, "gpu nvidia").detail == f"2: {each}; {each}; driver 570.86.15"
    assert only(found, "gpu topology").detail == "GPU0 NV18"
    machine(nvidia_smi="#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n")
    (check,) = gpus.check_nvidia()
    assert check.state == "missing" and check.detail == "nvidia-smi: failed with exit code 9: NVIDIA-SMI has failed"


def test_slices_are_told(machine: Any) -> None:
    machine(nvidia_smi=nvidia(count=1, listing=NVIDIA_MIG))
    found = only(gpus.check_nvidia(), "gpu slices")
    assert found.detail == "3 MIG devices, each for one rank: 2 x 3g.20gb, 1 x 1g.5gb"


@pytest.mark.parametrize("data", [AMD_SMI, {"gpu_data": AMD_SMI}], ids=["ROCm 6", "ROCm 7"])
def test_amd_by_amd_smi(machine: Any, data: Any) -> None:
    machine(amd_smi=json.dumps(data), rocm_smi="must not be asked")
    each = "AMD Instinct MI300X, 196592 MB"
    (check,) = gpus.check_amd()
    assert check == DoctorCheck("gpu amd", "ok", f"2: {each}; {each}; driver 6.10.5 (amd-smi)")


def test_amd_by_rocm_smi(machine: Any) -> None:
    machine(rocm_smi=json.dumps(ROCM_SMI))
    (check,) = gpus.check_amd()
    assert check == DoctorCheck("gpu amd", "ok", "1: Radeon RX 7900 XT, 20 GiB; driver 6.8.5 (rocm-smi)")
    machine(amd_smi="#!/bin/sh\necho 'Unable to load the amdgpu driver' >&2; exit 255\n")
    assert gpus.check_amd()[0].state == "ok", "the older tool answers where the newer one fails"
    machine(rocm_smi="WARNING: No JSON data to report")
    (check,) = gpus.check_amd()
    assert check.state == "missing" and "amd-smi: failed with exit code 255: Unable to load" in check.detail
    assert "lsmod | grep amdgpu" in str(check.remedy)


def test_intel_is_listed_and_not_measured(machine: Any) -> None:
    machine(xpu_smi=json.dumps(XPU_SMI))
    (check,) = gpus.check_intel()
    assert (check.state, check.detail) == ("warning", "1: Intel(R) Data Center GPU Max 1100")
    assert check.remedy == "not measured by this version: ranks compute on the cores of this machine"
    machine(xpu_smi="#!/bin/sh\necho 'Error: No device discovered'; exit 1\n")
    (check,) = gpus.check_intel()
    assert check.state == "missing" and "No device discovered" in check.detail


BUILDS = {
    "the CPU only": ("2.13.0+cpu", {}),
    "CUDA 13.0": ("2.13.0+cu130", {"cuda": "13.0"}),
    "ROCm 7.1": ("2.13.0+rocm7.1", {"hip": "7.1.52802"}),
    "XPU 20250300": ("2.13.0+xpu", {"xpu": "20250300"}),
}


@pytest.mark.parametrize("built", BUILDS)
@pytest.mark.parametrize("maker", ["NVIDIA", "AMD"])
def test_a_build_for_other_gpus_is_named(machine: Any, torch_is: Any, built: str, maker: str) -> None:
    version, builds = BUILDS[built]
    fits = (maker, built.split()[0]) in (("NVIDIA", "CUDA"), ("AMD", "ROCm"))
    torch_is(version, ("one", "two") if fits else (), **builds)
    machine(**{"nvidia_smi": nvidia("580.65.06")} if maker == "NVIDIA" else {"amd_smi": json.dumps(AMD_SMI)})
    check = only(gpus.check_torch(), "torch")
    assert check.detail.startswith(f"{version}, built for {built}")
    if fits:
        assert (check.state, check.remedy) == ("ok", None)
        return
    assert check.state == "warning" and check.detail.endswith(f"no usable GPU; this machine has 2 {maker} GPUs")
    name = {"NVIDIA": "CUDA", "AMD": "ROCm"}[maker]
    assert check.remedy == (
        "pip install --force-reinstall 'torch==2.13.0' --index-url INDEX, with the INDEX that "
        f"https://pytorch.org/get-started/locally names for {name}"
    )


def test_a_driver_that_is_too_old_for_the_build(machine: Any, torch_is: Any) -> None:
    torch_is("2.13.0+cu130", cuda="13.0")
    machine(nvidia_smi=nvidia("570.86.15"))
    check = only(gpus.check_torch(), "torch")
    assert check.state == "warning" and check.detail.endswith("driver 570.86.15 is too old for CUDA 13.0")
    assert str(check.remedy).startswith("update the driver to 580 or newer; or pip install --force-reinstall")
    assert str(check.remedy).endswith("names for CUDA 12")
    machine(nvidia_smi=nvidia("580.65.06"))
    check = only(gpus.check_torch(), "torch")
    assert "it finds none of 2: NVIDIA A100" in check.detail and "CUDA_VISIBLE_DEVICES" in str(check.remedy)


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((8, 6), ["sm_80", "sm_90"], True),
        ((7, 0), ["sm_75", "sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((7, 5), [], True),
    ],
)
def test_a_build_without_kernels_for_the_device(
    machine: Any, torch_is: Any, capability: tuple[int, int], kernels: list[str], runs: bool
) -> None:
    torch_is("2.13.0+cu130", ("GPU",), capability, cuda="13.0", kernels=kernels)
    machine(nvidia_smi=nvidia("580.65.06", count=1))
    check = only(gpus.check_torch(), "torch")
    assert check.state == ("ok" if runs else "warning")
    if not runs:
        assert f"GPU has compute capability {capability[0]}.{capability[1]}, and the build has " in check.detail


def test_bfloat16_that_torch_emulates(machine: Any, torch_is: Any) -> None:
    """On a processor without AVX-512 or AMX; where a GPU computes, nobody asks."""
    torch_is("2.13.0+cpu", bfloat16=False)
    check = only(gpus.check_torch(), "bfloat16 on the CPU")
    assert check.state == "warning" and "slower than in float32" in check.detail
    assert check.remedy is not None and check.remedy.startswith("train in float32 here")
    torch_is("2.13.0+cpu", bfloat16=True)
    assert only(gpus.check_torch(), "bfloat16 on the CPU").state == "ok"
    torch_is("2.13.0+cu130", ("NVIDIA H100 80GB HBM3",), (9, 0), cuda="13.0", bfloat16=False)
    assert [check for check in gpus.check_torch() if check.name == "bfloat16 on the CPU"] == []


def test_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = gpus.check_torch()
    assert check.state == "missing" and "libcudart.so.99" in check.detail and check.remedy is not None


def test_torch_whose_import_takes_long_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_TORCH_SECONDS", 0.01)
    (check,) = gpus.check_torch()
    assert check.state == "warning" and check.detail == "no response within 0.01 s"


def test_the_torch_of_this_environment(machine: Any) -> None:
    check = only(gpus.check_torch(), "torch")
    import torch

    assert check.detail.startswith(torch.__version__) and check.state == "ok"


def test_a_tool_that_answers_late_is_no_missing_driver(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver wakes many GPUs first: after 5 s it was said to be missing."""
    machine(nvidia_smi="#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(gpus, "_TOOL_SECONDS", 0.2)
    (check,) = gpus.check_nvidia()
    assert check.state == "warning" and check.detail == "nvidia-smi: no response within 0.2 s"
    assert check.remedy is not None and "persistence" in check.remedy
