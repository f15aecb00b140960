"""A whole ZeRO cell on two hosts, started by DeepSpeed's own launcher and by torchrun: the same losses, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Measurement
from configs.plans.model_manifest import ModelManifest
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.targets.target import SlurmTarget
from configs.workloads.train import TrainWorkload
from tests.support.cluster.launches import leftovers, part, read_job, write_job
from tests.support.cluster.two_hosts import NAMES, TwoHosts, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


def losses(hosts: TwoHosts, folder: Path, launcher: str, strategy: str) -> np.ndarray:
    """Of the steps of a cell that a launcher has started on both hosts."""
    work = TrainWorkload(
        global_batch_size=8, micro_batch_size=2, sequence_length=32, steps=5, optimizer="adamw", learning_rate=0.003
    )
    layout = Layout(dp=2, strategy=strategy)  # type: ignore[arg-type]
    cell = Cell(model="synthetic:llama-1m@7", workload=work, layout=layout, nodes=2, target="slurm")
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    paths = write_job(folder, [measurement], name=f"{launcher}-{strategy}", warmup=2)
    manifest = ModelManifest(
        identity="synthetic:llama-1m@7", source="synthetic", folder="", files={}, config=ARCHITECTURES["llama-1m"]
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    target = SlurmTarget(nodes=2, launcher=launcher)  # type: ignore[arg-type]
    changes = {"target": target, "ranks_per_node": 1, "manifest": str(folder / "manifest.json")}
    paths.job.write_text(read_job(paths.folder).model_copy(update=changes).model_dump_json())
    ends = hosts.launch(paths)
    parts = [part(paths, measurement, rank) for rank in range(2)]
    assert [end.status for end in ends] == [Status.COMPLETED] * 2, [one.failure for one in parts]
    assert [one.host for one in parts] == list(NAMES)
    assert parts[0].figures["accumulation"] == 2
    columns = []
    for rank in range(2):
        with np.load(paths.samples(measurement.name, rank)) as archive:
            columns.append({name: archive[name] for name in archive.files})
    assert all((each["exposed_communication_seconds"] > 0).all() for each in columns)
    np.testing.assert_array_equal(columns[0]["loss"], columns[1]["loss"])
    loss: np.ndarray = columns[0]["loss"]
    assert len(loss) == 5
    return loss


def test_both_launchers_train_alike(tmp_path: Path) -> None:
    for name in ("run", "hosts"):
        (tmp_path / name).mkdir()
    with TwoHosts(tmp_path / "hosts") as hosts:
        by_deepspeed = losses(hosts, tmp_path / "run", "deepspeed", "zero2")
        np.testing.assert_array_equal(by_deepspeed, losses(hosts, tmp_path / "run", "torchrun", "zero2"))
        by_ddp = losses(hosts, tmp_path / "run", "torchrun", "ddp")
        np.testing.assert_allclose(by_deepspeed, by_ddp, rtol=1e-5)
    assert leftovers(tmp_path) == []
