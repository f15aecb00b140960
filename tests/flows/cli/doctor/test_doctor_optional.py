"""What `rankwise doctor` says of DeepSpeed, ONNX, live streams, ROCm, InfiniBand and buffers, each with a remedy."""

import importlib.metadata
from pathlib import Path

import pytest

from configs.spec.measuring import LIVE_LIBRARIES
from flows.cli.doctor import optional
from flows.cli.doctor.command import diagnose


def without(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def put(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.slow
def test_all_are_part_of_the_diagnosis_and_none_is_without_remedy(tmp_path: Path) -> None:
    found = {check.name: check for check in diagnose(None, tmp_path, tmp_path)}
    wanted = {"deepspeed", "CPU kernels", "onnx", "rocm", "infiniband", "socket buffers", "NCCL_BUFFSIZE"}
    assert wanted | {f"live {sink}" for sink in LIVE_LIBRARIES} <= found.keys()
    assert all(check.remedy for check in found.values() if check.state != "ok")


def test_libraries_that_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    without({"deepspeed", "onnxscript", "wandb"}, monkeypatch)
    (deepspeed,), (onnx,) = optional.check_deepspeed(), optional.check_onnx()
    assert deepspeed.state == onnx.state == "missing"
    assert "pip install deepspeed" in str(deepspeed.remedy) and "pip install 'rankwise[onnx]'" in str(onnx.remedy)
    assert onnx.detail == "onnxscript not installed"
    live = {check.name: check for check in optional.check_live()}
    assert live["live wandb"].state == "missing" and "rankwise[wandb]" in str(live["live wandb"].remedy)
    assert live["live prometheus"].state == "ok"


def test_large_socket_buffers_are_written_out(tmp_path: Path) -> None:
    """The largest value that there is, as on tuned clusters, was `2.05e+03 MiB`."""
    for name in ("rmem_max", "wmem_max"):
        put(tmp_path, f"proc/sys/net/core/{name}", "2147483647\n")
    (sockets,) = (check for check in optional.check_buffers(tmp_path) if check.name == "socket buffers")
    assert sockets.state == "ok" and "rmem_max 2,050 MiB" in sockets.detail


def test_deepspeed_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = optional.check_deepspeed()
    assert found.state == "warning" and "c++ and ninja not on PATH" in found.detail
    assert "build-essential" in str(found.remedy)


def test_kernels_are_compiled_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (found,) = optional.check_kernels()
    assert (found.state, found.detail) == ("ok", "compiled for this processor"), found
    assert list((tmp_path / "cache" / "rankwise" / "kernels").glob("linear-*.so")), "as a rank finds it"
    monkeypatch.setenv("RANKWISE_KERNELS", "off")
    (found,) = optional.check_kernels()
    assert found.state == "warning" and found.remedy == "unset it"
    assert found.detail == "torch computes instead, more slowly: linear.c: RANKWISE_KERNELS=off"
    monkeypatch.delenv("RANKWISE_KERNELS")
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = optional.check_kernels()
    assert found.state == "warning" and "no C compiler: cc" in found.detail
    assert found.remedy == "apt-get install gcc, or set CC"
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\n[ $1 = --version ]\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    monkeypatch.setenv("RANKWISE_KERNELS", "avx2")
    (found,) = optional.check_kernels()
    assert "-march=x86-64-v3" in found.detail and found.remedy == "apt-get install gcc, or set CC"


@pytest.mark.parametrize("source", ["rows.c", "shared_memory.c"])
def test_a_compiler_that_takes_some_kernels_only_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """As gcc 8 does, which has no conversion of vectors."""
    old = tmp_path / "cc"
    old.write_text(f'#!/bin/sh\ncase "$*" in *{source}*) exit 1;; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(old))
    (found,) = optional.check_kernels()
    assert found.state == "warning" and f"more slowly: {source}: " in found.detail, found


def test_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert optional.check_rocm(tmp_path)[0].state == "missing"
    device = put(tmp_path, "dev/kfd", "")
    (wrong,) = optional.check_rocm(tmp_path)
    assert wrong.state == "warning" and "ROCm build of torch" in str(wrong.remedy)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+rocm6.4")
    assert optional.check_rocm(tmp_path)[0].state == "ok"
    monkeypatch.setattr(optional.os, "access", lambda path, mode: path != device)
    assert "usermod -aG render,video" in str(optional.check_rocm(tmp_path)[0].remedy)


@pytest.mark.parametrize(
    ("state", "disabled", "expected", "remedy"),
    [
        ("4: ACTIVE", None, "ok", ""),
        ("4: ACTIVE", "0", "ok", ""),
        ("4: ACTIVE", "1", "warning", "unset NCCL_IB_DISABLE"),
        ("1: DOWN", None, "warning", "export NCCL_IB_DISABLE=1"),
        ("1: DOWN", "1", "ok", ""),
        (None, None, "missing", "export NCCL_IB_DISABLE=1"),
        (None, "1", "ok", ""),
    ],
)
def test_infiniband(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, disabled: str | None, expected: str, remedy: str
) -> None:
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    if disabled is not None:
        monkeypatch.setenv("NCCL_IB_DISABLE", disabled)
    if state is not None:
        put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", f"{state}\n")
    (found,) = optional.check_infiniband(tmp_path)
    assert found.state == expected and remedy in (found.remedy or "")
    assert "mlx5_0" in found.detail or "ACTIVE" not in str(state)


def test_socket_buffers(tmp_path: Path) -> None:
    assert optional.check_buffers(tmp_path)[0].detail == "limits not visible here"
    for name, text in (
        ("core/rmem_max", "212992"),
        ("core/wmem_max", "33554432"),
        ("ipv4/tcp_rmem", "4096\t131072\t6291456"),
        ("ipv4/tcp_wmem", "4096\t16384\t16777216"),
    ):
        put(tmp_path, f"proc/sys/net/{name}", f"{text}\n")
    small = optional.check_buffers(tmp_path)[0]
    assert small.state == "warning" and "net.core.rmem_max 0.203 MiB" in small.detail
    assert str(small.remedy).endswith("sysctl -w net.core.rmem_max=16777216 net.ipv4.tcp_rmem='4096 87380 16777216'")
    put(tmp_path, "proc/sys/net/core/rmem_max", "16777216")
    put(tmp_path, "proc/sys/net/ipv4/tcp_rmem", "4096 131072 33554432")
    assert optional.check_buffers(tmp_path)[0].state == "ok"


@pytest.mark.parametrize(
    ("value", "state"), [(None, "ok"), ("8388608", "ok"), ("1024", "warning"), ("8M", "warning"), ("0", "warning")]
)
def test_nccl_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None, state: str) -> None:
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_BUFFSIZE", value)
    assert optional.check_buffers(tmp_path)[1].state == state
