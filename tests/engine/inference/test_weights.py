"""Loading a shard: what is read, what is kept, what is told, what is refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from engine.context import Context
from engine.inference.weights import LoadedShard, finalize_weights, is_finalized, load_shard, read_shard, shard_figures
from engine.loading import evict
from engine.models.weights import build_model, weights_hash
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from tests.support.answers.sharded_runs import loaded_from
from tests.support.rank_pool import RankPool
from tests.support.training.memory_models import save_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {"vocab_size": 251, "num_hidden_layers": 3, "attention_bias": True}


def synthetic(seed: int = 3, **changes: Any) -> ModelManifest:
    return ModelManifest(
        identity=f"synthetic:tiny@{seed}", source="synthetic", folder="", files={}, config=CONFIG | changes
    )


def saved(folder: Path, stored: torch.dtype = torch.float32, **changes: Any) -> ModelManifest:
    """The synthetic model in a folder."""
    manifest = synthetic(**changes)
    save_model(build_model(manifest, torch.float32, CPU)[0], manifest.config, folder, stored)
    return manifest_of(folder)


def manifest_of(folder: Path) -> ModelManifest:
    config = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity="folder:0", source="folder", folder=str(folder), files={}, config=config)


def read(manifest: ModelManifest, tp: int = 1, pp: int = 1, rank: int = 0, dtype: Any = torch.float32) -> LoadedShard:
    return read_shard(manifest, Grid(1, tp, pp, rank), Communicator((0,), 0), dtype, CPU)


def context_of(folder: Path, manifest: ModelManifest, tp: int = 1, **job: Any) -> Context:
    cell = Cell(model="m", workload=GenerateWorkload(prompt_tokens=4, new_tokens=2), layout=Layout(tp=tp))
    made = Job(
        name="job",
        study="s",
        measuring_pass=job.get("measuring_pass", "timed"),
        measuring=Measuring(),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=tp,
        timeout_seconds=60,
        inputs=str(folder),
        cache=str(folder),
    )
    return Context(made, JobPaths(folder), 0, tp, CPU, manifest, lambda: None)


@pytest.mark.parametrize("tied", [True, False])
def test_one_rank_has_the_hash_and_the_bytes_of_the_whole_model(tmp_path: Path, tied: bool) -> None:
    manifest = saved(tmp_path, tie_word_embeddings=tied)
    whole = build_model(manifest, torch.bfloat16, CPU)[0]
    loaded = read(manifest, dtype=torch.bfloat16)
    assert loaded.digest == weights_hash(whole)
    assert loaded.weights_bytes == sum(parameter.nbytes for parameter in whole.parameters())
    assert loaded.digest == read(synthetic(tie_word_embeddings=tied), dtype=torch.bfloat16).digest
    assert loaded.digest != read(manifest, dtype=torch.float32).digest


def test_shards_have_hashes_of_their_own_in_each_layout() -> None:
    seen = [read(synthetic(), tp, pp, rank).digest for tp, pp in [(1, 1), (2, 1), (1, 2)] for rank in range(tp * pp)]
    assert len(set(seen)) == 5
    assert seen == [
        read(synthetic(), tp, pp, rank).digest for tp, pp in [(1, 1), (2, 1), (1, 2)] for rank in range(tp * pp)
    ]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 3)])
def test_a_rank_reads_what_it_keeps_and_nothing_else(tmp_path: Path, tp: int, pp: int) -> None:
    manifest = saved(tmp_path, tie_word_embeddings=False)
    ranks = [read(manifest, tp, pp, rank) for rank in range(tp * pp)]
    for loaded in ranks:
        assert loaded.report is not None and loaded.file_bytes is not None
        assert loaded.report.asked_bytes == loaded.weights_bytes
        assert loaded.weights_bytes < 1.3 * loaded.file_bytes / (tp * pp)
    # Only the norms, and the halves of biases that are not halves, are held more than once.
    held, file_bytes = sum(loaded.weights_bytes for loaded in ranks), ranks[0].file_bytes
    assert file_bytes is not None and file_bytes <= held < 1.02 * file_bytes


def test_shards_from_files_and_from_the_seed_are_the_same(tmp_path: Path) -> None:
    for tied in (True, False):
        manifest = saved(tmp_path / str(tied), tie_word_embeddings=tied)
        for (tp, pp), dtype in product([(2, 1), (2, 2)], [torch.float32, torch.bfloat16]):
            for rank in range(tp * pp):
                made = read(synthetic(tie_word_embeddings=tied), tp, pp, rank, dtype)
                assert made.digest == read(manifest, tp, pp, rank, dtype).digest


def test_figures_of_the_load_are_told_once(tmp_path: Path) -> None:
    manifest = saved(tmp_path)
    context = context_of(tmp_path, manifest)
    shard = load_shard(context, torch.float32)
    finalize_weights(context)
    first = shard_figures(context)
    assert load_shard(context, torch.float32) is shard
    finalize_weights(context)
    again = shard_figures(context)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert file_bytes * 0.98 < first["load_bytes"] == first["load_asked_bytes"] == first["weights_bytes"] < file_bytes
    assert first["load_seconds"] > 0
    assert first["model_parameters"] * 4 == first["weights_bytes"]
    told_once = {name for name in first if name.startswith("load_")} | {"hash_seconds", "finalize_seconds"}
    assert told_once >= {"load_seconds", "load_bytes", "load_asked_bytes", "load_device_bytes", "load_page_cache_share"}
    assert again == first | dict.fromkeys(told_once)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("stored", "page_cache"), [("float32", "warm"), ("bfloat16", "warm"), ("float32", "cold")])
def test_answers_before_and_after_settling_are_the_same(
    tmp_path: Path, stored: str, page_cache: str, tied: bool
) -> None:
    manifest = saved(tmp_path, getattr(torch, stored), tie_word_embeddings=tied)
    file = tmp_path / "model.safetensors"
    if page_cache == "cold" and evict([file]):
        pytest.skip("the files stay in the page cache here")
    context = context_of(tmp_path, manifest)
    shard = load_shard(context, torch.float32)
    assert shard.weights.memory_mapped == ((stored, page_cache) == ("float32", "warm")), (
        "what is converted is copied anyway"
    )
    tokens = torch.arange(24).view(2, 12) % shard.config.vocabulary

    def logits() -> torch.Tensor:
        return shard.head(shard.forward(tokens, shard.new_cache(2, 12)))

    ready = logits()
    assert not is_finalized(context)
    finalize_weights(context)
    assert is_finalized(context) and not shard.weights.memory_mapped
    with file.open("r+b") as open_file:  # whatever still lay in the file would change now
        open_file.write(bytes(file.stat().st_size))
    assert torch.equal(logits(), ready)
    from_the_seed = read(synthetic(tie_word_embeddings=tied)).shard if stored == "float32" else shard
    assert torch.equal(from_the_seed.head(from_the_seed.forward(tokens, from_the_seed.new_cache(2, 12))), ready)


def test_a_synthetic_model_is_read_from_nowhere(tmp_path: Path) -> None:
    context = context_of(tmp_path, synthetic(), measuring_pass="memory")
    load_shard(context, torch.float32)
    finalize_weights(context)
    figures = shard_figures(context)
    assert figures["load_bytes"] is figures["load_asked_bytes"] is None
    assert "load_peak_memory_bytes" in figures


def test_degrees_that_do_not_work_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layout\.tp: 3 ranks .* use one of: 1, 2, 4"):
        load_shard(context_of(tmp_path, synthetic(), tp=3), torch.float32)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.2.mlp.up_proj.weight", None, "tensor model.layers.2.mlp.up_proj.weight is missing"),
        ("model.norm.bias", torch.ones(128), "tensor model.norm.bias is not part of the model"),
        ("model.norm.weight", torch.ones(64), r"has the shape \(64,\); config.json asks for \(128,\)"),
        ("model.norm.weight", torch.ones(128, dtype=torch.int8), "model.norm.weight is torch.int8"),
    ],
)
def test_what_does_not_fit_is_named_by_every_rank_whatever_it_keeps(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    manifest = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {name: tensor}
    save_file({key: value for key, value in tensors.items() if value is not None}, path)
    for rank in range(2):
        with pytest.raises(ValueError, match=message) as raised:
            read(manifest, pp=2, rank=rank)
        assert str(path) in str(raised.value)


def test_a_file_that_is_damaged_on_one_node_is_named_on_all_ranks(tmp_path: Path) -> None:
    manifests = [saved(tmp_path / name) for name in ("whole", "damaged")]
    path = tmp_path / "damaged" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    folders = [manifest.folder for manifest in manifests]
    with RankPool(2, timeout_seconds=60) as pool:
        for order in (folders, folders[::-1]):
            for said in pool.run(loaded_from, order):
                assert said.startswith(f"{path}: truncated or damaged")
        assert pool.run(loaded_from, [folders[0]] * 2) == ["", ""]
