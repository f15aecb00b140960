"""When DeepSpeed is imported before a process forks: with builds of torch for CPUs alone."""

import pytest
import torch

from engine.training.zero import start


@pytest.mark.parametrize(("cuda", "hip", "imports"), [(None, None, ["cpu"]), ("13.0", None, []), (None, "7.1", [])])
def test_it_is_imported_early_for_cpus_alone(
    cuda: str | None, hip: str | None, imports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for AMD's GPUs has no version of CUDA: its children computed with DeepSpeed's accelerator for CPUs."""
    asked: list[str] = []
    monkeypatch.setattr(start, "_import", asked.append)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    start.preload_deepspeed()
    assert asked == imports
