"""Passes over weights: which are run, what is pruned, what it costs in quality, and that every layout does the same."""

import gc
import re
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from engine.compression import Compressor, Hardware, hardware_of, resolve
from engine.compression.pruning import pruned, pruning_group_of
from engine.context import Context
from engine.inference.weights import finalize_weights, load_shard, read_shard, shard_figures
from engine.kernels.linear import pack_linear
from engine.kernels.quantized import own_path, quantize_linear
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid
from tests.support.answers.compressed_runs import CPU, FOLDER, load, logits, manifest_of_tiny_stdlib
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

VNNI, PLAIN, SPARSE = Hardware("cpu", "avx512_vnni"), Hardware("cpu"), Hardware("cuda", sparse_units=True)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("asked", "hardware", "passes"),
    (
        (("balanced",), VNNI, ("int8",)),
        (("aggressive",), VNNI, ("int4",)),
        (("balanced",), PLAIN, ()),
        (("aggressive",), PLAIN, ()),
        (("balanced",), Hardware("cpu", "avx2"), ()),
        (("balanced",), SPARSE, ()),
        (("aggressive",), SPARSE, ("prune_2_4",)),
        (("aggressive",), Hardware("cuda"), ()),
        (("prune_50", "int4"), PLAIN, ("prune_50", "int4")),
        ((), VNNI, ()),
    ),
)
def test_levels_follow_the_hardware(asked: tuple[str, ...], hardware: Hardware, passes: tuple[str, ...]) -> None:
    assert resolve(asked, hardware) == passes


def test_this_machine_is_judged_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware_of(CPU, torch.bfloat16) == Hardware("cpu", own_path())
    assert hardware_of(CPU, torch.float16) == PLAIN
    assert hardware_of(torch.device("mps"), torch.float16) == Hardware("mps")


@pytest.mark.parametrize(
    ("scheme", "dtype", "hardware", "reason"),
    (
        ("int4", torch.float16, Hardware("cuda", capability=(8, 0)), "use `dtype: bfloat16`"),
        ("int4", torch.bfloat16, Hardware("cuda", capability=(7, 5)), "8.0 or more, and this one has 7.5"),
        ("float8", torch.bfloat16, Hardware("cuda", capability=(8, 6)), "8.9 or more, and this one has 8.6"),
        ("int8", torch.bfloat16, Hardware("cuda", capability=(7, 0)), "7.5 or more"),
        ("int8_dynamic", torch.bfloat16, Hardware("cuda"), "CPUs and NVIDIA GPUs only"),  # ROCm
        ("int8", torch.float16, Hardware("mps"), "CPUs and NVIDIA GPUs only"),
    ),
)
def test_what_a_gpu_has_no_kernel_for_is_refused(
    scheme: str, dtype: torch.dtype, hardware: Hardware, reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Compressor((scheme,), dtype, CPU, hardware)
    able = Hardware("cuda", capability=(9, 0))
    assert Compressor((scheme,), torch.bfloat16, CPU, able).passes == (scheme,)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_two_of_four_are_the_largest(dtype: torch.dtype) -> None:
    weight = numbers(300, 38, dtype=dtype)
    done = pruned("prune_2_4", weight)
    assert torch.equal(done[done != 0], weight[done != 0])
    fours, kept = weight[:, :36].abs().view(300, -1, 4), (done[:, :36] != 0).view(300, -1, 4)
    assert (kept.sum(2) == 2).all()
    smallest_kept = fours.masked_fill(~kept, float("inf")).amin(2)
    assert (fours.masked_fill(kept, 0).amax(2) <= smallest_kept).all()
    assert (done[:, 36:] != 0).all(), "two beyond the last four are the largest of their group"
    assert torch.equal(pruned("prune_2_4", torch.ones(1, 4, dtype=dtype)), torch.tensor([[1, 1, 0, 0]]).to(dtype))


@pytest.mark.parametrize("percent", (10, 33, 50, 90))
def test_a_share_of_each_output_goes_the_smallest_of_each_block(percent: int) -> None:
    weight = numbers(200, 3200, dtype=torch.bfloat16)
    done = pruned(f"prune_{percent}", weight)
    gone = done == 0
    assert (gone.sum(1) == 32 * percent).all() and torch.equal(done[~gone], weight[~gone])
    blocks, lost = weight.float().abs().view(200, -1, 32), gone.view(200, -1, 32)
    assert (blocks.masked_fill(~lost, 0).amax(2) <= blocks.masked_fill(lost, float("inf")).amin(2)).all()
    kept_size = done.float().square().sum() / weight.float().square().sum()
    in_order = weight.float().square().flatten().sort().values
    best_size = in_order[in_order.numel() * percent // 100 :].sum() / in_order.sum()
    assert best_size - 0.025 < kept_size <= best_size, "choosing among 32 loses little against choosing among all"


@pytest.mark.parametrize("inputs", (1, 16, 48, 100, 352))
@pytest.mark.parametrize("percent", (10, 50, 99))
def test_a_share_goes_of_inputs_that_fill_no_block(inputs: int, percent: int) -> None:
    weight = numbers(20, inputs, dtype=torch.float32)
    weight[0] = 0.0
    done = pruned(f"prune_{percent}", weight)
    gone = done[1:] == 0
    assert (gone.sum(1) == inputs * percent // 100).all() and torch.equal(done[1:][~gone], weight[1:][~gone])
    for first in range(0, inputs, 32):
        size, lost = weight[1:, first : first + 32].abs(), gone[:, first : first + 32]
        assert (size.masked_fill(~lost, 0).amax(1) <= size.masked_fill(lost, float("inf")).amin(1)).all()


@pytest.mark.parametrize("percent", (98, 99))
def test_a_block_of_which_nothing_is_kept(percent: int) -> None:
    weight = numbers(8, 3200, dtype=torch.float32)
    done = pruned(f"prune_{percent}", weight)
    assert ((done == 0).sum(1) == 32 * percent).all() and ((done == 0).view(8, -1, 32).sum(2) >= 31).all()
    assert torch.equal(done[done != 0], weight[done != 0])


@pytest.mark.parametrize("pruning", ("prune_2_4", "prune_30", "prune_75"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_shares_are_pruned_as_the_whole_is(pruning: str, dtype: torch.dtype) -> None:
    weight = numbers(70, 352, dtype=dtype).mul(4).round()  # many alike
    whole = pruned(pruning, weight)
    group = pruning_group_of(pruning)
    assert torch.equal(torch.cat([pruned(pruning, weight[:33]), pruned(pruning, weight[33:])]), whole)
    for cut in (group, 5 * group, 352 - group):
        left, right = pruned(pruning, weight[:, :cut]), pruned(pruning, weight[:, cut:], cut)
        assert torch.equal(torch.cat([left, right], 1), whole)
    with pytest.raises(ValueError, match=rf"{pruning} chooses among {group} inputs.*at input 354.*of {group}$"):
        pruned(pruning, weight[:, 2:], 354)


def test_without_passes_it_only_packs() -> None:
    parts, bias = [numbers(5, 40), numbers(60, 40, seed=1)], numbers(65, seed=2)
    compressor = Compressor((), torch.float32, CPU)
    x = numbers(3, 40, seed=3)
    assert torch.equal(compressor.pack(parts, bias, "memory_mapped")(x), pack_linear(parts, bias)(x))
    assert compressor.figures(100, 50) == {}


def test_a_level_that_comes_to_nothing_says_so() -> None:
    compressor = Compressor(("balanced",), torch.float32, CPU, PLAIN)
    compressor.pack([numbers(5, 40)], None, "quick")
    assert compressor.figures(100, 50) == {
        "compression_passes": "none",
        "weights_bytes": 100,
        "dense_weights_bytes": 100,
        "nonzero_share": None,
        "compression_seconds": 0.0,
    }


def test_passes_come_one_after_the_other_and_are_told() -> None:
    parts, bias = [numbers(64, 64), numbers(64, 64, seed=1)], numbers(128, seed=2)
    x = numbers(3, 64, seed=3)
    compressor = Compressor(("prune_2_4", "int8"), torch.float32, CPU)
    layer = compressor.pack(parts, bias, "quick", first_input=64)
    assert torch.equal(layer(x), quantize_linear([pruned("prune_2_4", part) for part in parts], bias, "int8")(x))
    figures = compressor.figures(dense_bytes=4 * 128 * 64 + 1000, plain_bytes=1000)
    assert figures["compression_passes"] == "prune_2_4+int8" and figures["nonzero_share"] == 0.5
    assert figures["weights_bytes"] == 1000 + layer.nbytes and figures["dense_weights_bytes"] == 4 * 128 * 64 + 1000
    assert isinstance(figures["compression_seconds"], float) and figures["compression_seconds"] > 0
    only_pruned = Compressor(("prune_25",), torch.float32, CPU, PLAIN)
    layer = only_pruned.pack(parts, bias, "memory_mapped")
    assert torch.equal(layer(x), pack_linear([pruned("prune_25", part) for part in parts], bias)(x))
    figures = only_pruned.figures(dense_bytes=500, plain_bytes=100)
    assert (figures["weights_bytes"], figures["nonzero_share"]) == (500, 0.75)


@pytest.mark.parametrize("passes", (("int8",), ("int4",), ("prune_50",), ("prune_2_4", "int8_dynamic")))
def test_nothing_keeps_the_weights_as_they_came(passes: tuple[str, ...]) -> None:
    weight = numbers(64, 64, dtype=torch.bfloat16)
    came = weakref.ref(weight)
    layer = Compressor(passes, torch.bfloat16, CPU).pack([weight], None, "memory_mapped")
    del weight
    gc.collect()
    assert came() is None or layer.path == "torch"


# --- quality and layouts, with tiny-stdlib ------------------------------------------------------------------

BARS = {
    ("int8",): 0.002,
    ("int8_dynamic",): 0.005,
    ("int4",): 0.04,
    ("prune_30",): 0.05,
    ("prune_50",): 0.2,
    ("prune_50", "int8"): 0.2,
    ("prune_2_4",): 0.5,
}


@cache
def _tokens() -> list[list[int]]:
    """Of this project's own source: the model has not seen it. 16 sequences of 256."""
    tokenizer: Any = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    sources = sorted((Path(__file__).parents[2] / "configs").rglob("*.py"))
    ids = tokenizer.encode("".join(path.read_text() for path in sources)).ids
    return [ids[start : start + 256] for start in range(0, 16 * 256, 256)]


@cache
def _one_rank(passes: tuple[str, ...]) -> np.ndarray:
    found = logits(0, passes, 1, 1, _tokens())
    assert isinstance(found, np.ndarray)
    return found


def _perplexity(of: np.ndarray) -> float:
    words = torch.tensor(_tokens())[:, 1:].flatten()
    return float(functional.cross_entropy(torch.from_numpy(of)[:, :-1].flatten(0, 1), words).exp())


@pytest.mark.parametrize("passes", BARS, ids="+".join)
def test_quality_of_a_real_model(passes: tuple[str, ...]) -> None:
    loss = _perplexity(_one_rank(passes)) / _perplexity(_one_rank(())) - 1
    assert -0.01 < loss < BARS[passes]


@pytest.mark.parametrize(("tp", "pp"), ((2, 1), (1, 2)))
@pytest.mark.parametrize("passes", (("int8",), ("int8_dynamic",), ("int4",), ("prune_50",), ("prune_2_4", "int8")))
def test_every_layout_answers_as_one_rank_does(pool: RankPool, passes: tuple[str, ...], tp: int, pp: int) -> None:
    answers = pool.run(logits, passes, tp, pp, _tokens()[:2])
    found, one_rank, plain = answers[-1], _one_rank(passes)[:2], _one_rank(())[:2]
    if pp == 2:
        assert np.array_equal(found, one_rank), "the same products, elsewhere"
    elif passes == ("prune_50",):
        assert np.abs(found - one_rank).max() < 1e-3, "the same weights are pruned"
    else:
        # Each rank has scales of its own for its share of an output's inputs, and of the values that come in.
        error = np.square(one_rank - plain).mean()
        assert 0 < np.square(found - one_rank).mean() < 3 * error
        assert np.square(found - plain).mean() < 1.5 * error, "as near to the uncompressed model"


def test_columns_of_tensor_parallel_ranks_have_the_bits_of_one_rank() -> None:
    weight, x = numbers(192, 256, dtype=torch.bfloat16), numbers(4, 256, dtype=torch.bfloat16, seed=1)
    for passes in (("int8",), ("int8_dynamic",), ("int4",), ("prune_50", "int8")):
        whole = Compressor(passes, torch.bfloat16, CPU).pack([weight], None, "quick")
        shares = [Compressor(passes, torch.bfloat16, CPU).pack([part], None, "quick") for part in weight.split(96)]
        together = torch.cat([share(x) for share in shares], dim=-1)
        assert torch.equal(together, whole(x)) or whole.path == "torch"


def test_a_compressed_shard_tells_what_it_is() -> None:
    grid = Grid(1, 1, 1, 0)
    loaded = load(("int8",), torch.bfloat16, grid, open_communicators(grid, CPU, None, 60))
    dense, now = loaded.compression["dense_weights_bytes"], loaded.compression["weights_bytes"]
    assert dense == loaded.weights_bytes == 8_000_000 and isinstance(now, int)
    table, norms = 4096 * 256 * 2, (2 * 4 + 1) * 256 * 2
    if own_path():
        scales = 4 * (4096 + 4 * (512 + 256 + 1408 + 256))
        assert now == table + norms + (dense - norms) // 2 + scales
    assert not loaded.shard.weights.memory_mapped


@pytest.mark.parametrize(
    "name", ("gpt2-1m", "opt-1m", "gpt-neox-1m", "gemma-1m", "phi3-1m", "llama-1m", "bert-1m", "t5-1m", "t5-gated-1m")
)
def test_every_architecture_is_compressed(name: str) -> None:
    manifest = ModelManifest(
        identity=f"synthetic:{name}@1", source="synthetic", folder="", files={}, config=ARCHITECTURES[name]
    )
    grid = Grid(1, 1, 1, 0)
    group = open_communicators(grid, CPU, None, 60).tensor
    found = {}
    for passes in ((), ("int8",), ("prune_2_4", "int4")):
        compressor = Compressor(passes, torch.float32, CPU)
        loaded = read_shard(manifest, grid, group, torch.float32, CPU, compressor=compressor)
        layers = [layer for shard in loaded.shards.values() for layer in shard.weights.layers]
        if passes and own_path():
            assert {layer.qkv.path for layer in layers} == {layer.down.path for layer in layers} == {own_path()}
            assert loaded.compression["weights_bytes"] < 0.75 * loaded.weights_bytes
        if len(loaded.shards) == 1:
            tokens = torch.arange(24).view(2, 12)
            shard = loaded.shard
            with torch.inference_mode():
                if shard.config.kind != "encoder":
                    found[passes] = shard.head(shard.forward(tokens, shard.new_cache(2, 12), None))
                else:
                    found[passes] = shard.encode(tokens, None)
    if found:
        size = found[()].square().mean()
        assert 0 < (found["int8",] - found[()]).square().mean() < 1e-3 * size
        assert (found["prune_2_4", "int4"] - found[()]).square().mean() > 1e-3 * size


def test_a_cell_names_the_passes_and_its_record_tells_them(tmp_path: Path) -> None:
    work = GenerateWorkload(prompt_tokens=4, new_tokens=2)
    cell = Cell.model_validate({"model": "m", "workload": work, "dtype": "bfloat16", "compression": "prune_50+int8"})
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    job = Job(
        name="job", study="s", measuring_pass="timed", measuring=Measuring(),
        measurements=(measurement,), ranks_per_node=1, timeout_seconds=60, inputs=str(tmp_path), cache=str(tmp_path),
    )  # fmt: skip
    context = Context(job, JobPaths(tmp_path), 0, 1, CPU, manifest_of_tiny_stdlib(), lambda: None)
    shard = load_shard(context, torch.bfloat16)
    assert not shard.weights.memory_mapped, "what is compressed is this rank's own from the start"
    finalize_weights(context)
    figures = shard_figures(context)
    assert figures["compression_passes"] == "prune_50+int8" and figures["nonzero_share"] == 0.5
    assert figures["dense_weights_bytes"] == 8_000_000
    seconds, all_seconds = figures["compression_seconds"], figures["load_seconds"]
    assert isinstance(seconds, float) and isinstance(all_seconds, float) and 0 < seconds < all_seconds
