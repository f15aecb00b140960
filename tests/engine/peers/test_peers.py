"""Other engines, really run on a tiny model: their answers are ours, their columns too, and nothing is left behind."""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.common.base import sha256_of_file
from configs.common.execution import Layout
from configs.common.files import abandoned
from configs.common.files.abandoned import ABANDONED_SECONDS
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelFile, ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import Figure, RankPart, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from engine.context import Context
from engine.loading import cached_share, evict
from engine.models.weights import build_model
from engine.peers.automatic import automatic_start
from engine.peers.compiled import need_compiler, static_cache
from engine.peers.folder_model import WorkKind, from_folder
from engine.peers.loading import touch
from engine.peers.onnx import peer
from engine.workloads.other_engines import run
from tests.support.cluster.launches import launch, part, told
from tests.support.flushed import names_of_flushed
from tests.support.training.memory_models import save_model

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
NEW_TOKENS = 6
LIMIT_SECONDS = 1500
WORK = GenerateWorkload(num_prompts=3, batch_size=2, prompt_tokens=9, new_tokens=NEW_TOKENS, answers=True)
COLUMNS = {"pass_seconds", "ttft_seconds", "request_seconds", "gap_seconds", "batch_sequences", "answer_tokens"}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ModelManifest:
    folder = tmp_path_factory.mktemp("model")
    made = ModelManifest(identity="synthetic:tiny@1", source="synthetic", folder="", files={}, config=CONFIG)
    save_model(build_model(made, torch.float32, CPU)[0], CONFIG, folder, torch.float32)
    weights = folder / "model.safetensors"
    file = ModelFile(sha256=sha256_of_file(weights), size_bytes=weights.stat().st_size)
    return ModelManifest(
        identity="folder:0", source="folder", folder=str(folder), files={weights.name: file}, config=CONFIG
    )


def test_code_in_the_folder_of_a_known_model_is_never_run(
    tmp_path: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(manifest.folder, folder)
    code = f"from pathlib import Path\nPath({str(tmp_path / 'run')!r}).touch()\n"
    for name in ("modeling_own.py", "configuration_own.py"):
        (folder / name).write_text(code)
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"auto_map": own})
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    answers = [
        from_folder(each, "generate", torch.float32)(torch.arange(5)[None]).logits
        for each in (folder, Path(manifest.folder))
    ]
    assert torch.equal(*answers) and not (tmp_path / "run").exists()


def write_job(folder: Path, manifest: ModelManifest, cache: Path, cell: Cell) -> tuple[JobPaths, Measurement]:
    """A job folder with one measurement of the cell."""
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    paths = JobPaths(folder / "jobs" / "job")
    paths.folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    job = Job(
        name="job",
        study="test",
        measuring_pass="timed",
        measuring=Measuring(warmup=1, min_passes=2, min_seconds=0),
        measurements=(measurement,),
        ranks_per_node=cell.layout.ranks,
        timeout_seconds=LIMIT_SECONDS,
        manifest=str(folder / "manifest.json"),
        inputs=str(folder / "inputs"),
        cache=str(cache),
    )
    paths.job.write_text(job.model_dump_json())
    return paths, measurement


def run_here(folder: Path, manifest: ModelManifest, **fields: Any) -> dict[str, np.ndarray]:
    """Samples of a one-rank cell, measured in this process."""
    paths, measurement = write_job(folder, manifest, folder / "cache", Cell(model="folder:0", workload=WORK, **fields))
    job = Job.model_validate_json(paths.job.read_bytes())
    outcome = run(measurement, Context(job, paths, 0, 1, CPU, manifest, lambda: None))
    assert outcome.samples.keys() >= COLUMNS
    return outcome.samples


def figures_here(folder: Path, manifest: ModelManifest, **fields: Any) -> dict[str, Figure]:
    """Figures of a one-rank cell of transformers, measured in this process."""
    cell = Cell(model="folder:0", workload=WORK, engine="transformers", **fields)
    paths, measurement = write_job(folder, manifest, folder / "cache", cell)
    job = Job.model_validate_json(paths.job.read_bytes())
    return run(measurement, Context(job, paths, 0, 1, CPU, manifest, lambda: None)).figures


def run_two_ranks(
    folder: Path, manifest: ModelManifest, cache: Path, **fields: Any
) -> tuple[list[RankPart], np.ndarray]:
    """Parts of both ranks of a launch of its own, and the tokens that the speaking one kept."""
    cell = Cell(model="folder:0", workload=WORK, layout=Layout(tp=2), **fields)
    paths, measurement = write_job(folder, manifest, cache, cell)
    end = launch(paths, LIMIT_SECONDS + 120)  # compiling takes minutes on a busy machine
    assert end.status is Status.COMPLETED, f"{end}\n{told(paths)}"
    parts = [part(paths, measurement, rank) for rank in range(2)]
    assert [found.status for found in parts] == [Status.COMPLETED] * 2, parts
    with np.load(paths.samples(measurement.name, 0)) as samples:
        assert set(samples) >= COLUMNS
        tokens = samples["answer_tokens"]
    assert not list(paths.folder.glob("peer_*")), "the small model was left"
    return parts, tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, manifest: ModelManifest) -> np.ndarray:
    """Greedy tokens of unmodified transformers."""
    return run_here(tmp_path_factory.mktemp("expected"), manifest, engine="transformers")["answer_tokens"]


def test_a_static_cache_gives_the_same_tokens(tmp_path: Path, manifest: ModelManifest, expected: np.ndarray) -> None:
    samples = run_here(tmp_path, manifest, engine="transformers", engine_mode="static")
    assert np.array_equal(samples["answer_tokens"], expected)
    assert len(samples["gap_seconds"]) == 2 * 2 * (NEW_TOKENS - 1)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_the_page_cache_is_set_for_the_files_that_are_read(
    tmp_path: Path, manifest: ModelManifest, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = tmp_path / "model", list[list[Path]]()
    shutil.copytree(manifest.folder, folder)
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")  # as Mistral's repositories have

    def prepare(files: list[Path], wanted: str) -> dict[str, Figure]:
        seen.append(list(files))
        return {"load_page_cache_share": 0.0, "raw_read_seconds": 1.0}

    monkeypatch.setattr("engine.loading.prepared._prepare", prepare)
    here = manifest.model_copy(update={"folder": str(folder)})
    figures = figures_here(tmp_path, here, engine_mode=mode, page_cache="cold")
    assert seen == [[folder / "model.safetensors"]]
    assert (figures["load_page_cache_share"], figures["raw_read_seconds"]) == (0.0, 1.0)


def test_plain_transformers_loads_without_imports_and_hashing(
    tmp_path: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(folder: Path, work: WorkKind, dtype: torch.dtype) -> Any:
        loaded.append(folder.name)
        return from_folder(folder, work, dtype)

    def hashing(model: torch.nn.Module) -> str:
        time.sleep(3)
        return "hash"

    monkeypatch.setattr("engine.peers.reference.from_folder", load)
    monkeypatch.setattr("engine.peers.reference.weights_hash", hashing)
    figures = figures_here(tmp_path, manifest)
    assert loaded == ["peer_rehearsal_0", Path(manifest.folder).name]
    assert figures["weights_hash"] == "hash" and float(str(figures["load_seconds"])) < 3
    assert not list(tmp_path.glob("**/peer_*"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_compiled_decoding_gives_the_same_tokens(
    tmp_path: Path, manifest: ModelManifest, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "set by the run"))
    cell = Cell(model="folder:0", workload=WORK, engine="transformers", engine_mode="compiled")
    paths, measurement = write_job(tmp_path, manifest, tmp_path / "cache", cell)
    launch(paths, LIMIT_SECONDS + 120)  # compiling takes minutes on a busy machine
    assert part(paths, measurement).status is Status.COMPLETED, part(paths, measurement)
    with np.load(paths.samples(measurement.name, 0)) as samples:
        assert np.array_equal(samples["answer_tokens"], expected)
    assert list((tmp_path / "cache" / "inductor").iterdir()), "nothing was compiled"


@pytest.mark.slow
def test_two_ranks_of_transformers_give_the_same_tokens(
    tmp_path: Path, manifest: ModelManifest, expected: np.ndarray
) -> None:
    parts, tokens = run_two_ranks(tmp_path, manifest, tmp_path / "cache", engine="transformers", page_cache="warm")
    assert np.array_equal(tokens, expected)
    shares = [float(found.figures["weights_bytes"]) / (4 * found.figures["model_parameters"]) for found in parts]
    assert shares[0] == pytest.approx(0.5, abs=0.02) == shares[1], "each rank has its half of the weights"
    assert all(found.figures["load_seconds"] > 0 for found in parts)
    assert parts[0].figures["load_page_cache_share"] == 1.0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_ranks_of_deepspeed_give_the_same_tokens_and_leave_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, manifest: ModelManifest, expected: np.ndarray
) -> None:
    pytest.importorskip("deepspeed")
    before = set(os.listdir("/dev/shm"))
    cache = tmp_path_factory.mktemp("cache")
    stale = cache / "torch_extensions" / "deepspeed_shm_comm" / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()  # as a compilation that was killed leaves it
    parts, tokens = run_two_ranks(tmp_path, manifest, cache, engine="deepspeed")
    assert np.array_equal(tokens, expected)
    assert parts[0].figures["weights_bytes"] < 0.8 * 4 * parts[0].figures["model_parameters"]
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("deepspeed")}


def test_deepspeed_without_shared_memory_is_unsupported(
    tmp_path: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # As docker run gives it, https://docs.docker.com/reference/cli/docker/container/run/ (--shm-size).
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    cell = Cell(model="folder:0", workload=WORK, layout=Layout(tp=2), engine="deepspeed")
    paths, _ = write_job(tmp_path, manifest, tmp_path / "cache", cell)
    job = Job.model_validate_json(paths.job.read_bytes())
    message = "needs 138 MB of shared memory for 2 ranks, and 67 MB are free in /dev/shm; give a container more"
    with pytest.raises(NotImplementedError, match=message):
        automatic_start(Context(job, paths, 0, 2, CPU, manifest, lambda: None))


def test_without_a_compiler_the_cell_is_unsupported(
    tmp_path: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotImplementedError, match="no-such-compiler"):
        run_here(tmp_path, manifest, engine="transformers", engine_mode="compiled")
    monkeypatch.setenv("CXX", "true")
    need_compiler("anything", "true")


def test_a_model_is_loaded_when_it_is_in_memory(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(4096, 1024)}, path)
    if evict([path]) != 0.0:
        pytest.skip("this folder cannot be evicted from memory")
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(load_file(path)["w"])
    touch(model)
    share = cached_share([path])
    assert share is not None and share > 0.99


LATENT = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip


def test_a_static_cache_is_no_constant_of_the_compiled_graph(manifest: ModelManifest) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(manifest.folder)
    cache = static_cache(model, rows=2, capacity=16)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
    assert len(tensors) == 3 * json.loads((Path(manifest.folder) / "config.json").read_text())["num_hidden_layers"]
    assert not any(hasattr(tensor, "_dynamo_static_input_type") for tensor in tensors)
    assert tensors[0].shape == (2, 2, 16, 32)
    assert not any(tensor.any() for tensor in tensors), "a cache is empty at first"


@pytest.mark.parametrize(("family", "sizes"), [("falcon", {"multi_query": True}), ("deepseek_v3", LATENT)])
def test_a_static_cache_has_the_heads_that_the_model_makes(family: str, sizes: dict[str, int]) -> None:
    """Falcon's one head of keys and DeepSeek's latents are not what `num_attention_heads` says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **plain, **sizes)).eval()
    tokens = torch.arange(3, 13).view(2, 5)
    chosen = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    chosen |= {"min_new_tokens": 4, "eos_token_id": None}
    cache = static_cache(model, rows=2, capacity=9)
    found = model.generate(tokens, **chosen, past_key_values=cache, disable_compile=True)
    assert torch.equal(found, model.generate(tokens, **chosen))


def test_the_bytes_of_graphs_are_without_the_tokenizer(tmp_path: Path) -> None:
    """A tokenizer of 33 MB was counted among the weights of a small Gemma."""
    sizes = {"decoder.onnx": 3, "decoder.onnx.data": 40, "config.json": 500, "tokenizer.json": 6000, "export.json": 7}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert peer.graph_bytes(tmp_path) == 43


def test_an_export_is_on_disk_before_it_has_its_name(
    manifest: ModelManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is believed by its name: a torn one would be loaded in vain again and again."""
    monkeypatch.setattr(peer, "version", lambda name: "1")
    monkeypatch.setattr(peer, "_export", lambda context, folder: (folder / "decoder.onnx").write_text("own"))
    cell = Cell(model=manifest.identity, workload=WORK, layout=Layout(), dtype="float32", engine="onnxruntime")
    job: Any = SimpleNamespace(cache=str(tmp_path), cell=cell)
    with names_of_flushed() as flushed:
        folder, _ = peer._exported(SimpleNamespace(job=job, manifest=manifest))  # type: ignore[arg-type]
    assert flushed == {folder / "decoder.onnx"}
    assert folder.stat().st_mode & 0o777 == 0o755, "another user of the cache could not enter it"


def test_an_export_that_was_killed_leaves_nothing_for_ever(
    manifest: ModelManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left a folder as large as the model in the cache."""
    monkeypatch.setattr(peer, "version", lambda name: "1")
    monkeypatch.setattr(peer, "_export", lambda context, folder: (folder / "decoder.onnx").write_text("own"))
    cell = Cell(model=manifest.identity, workload=WORK, layout=Layout(), dtype="float32", engine="onnxruntime")
    context: Any = SimpleNamespace(job=SimpleNamespace(cache=str(tmp_path), cell=cell), manifest=manifest)
    left = Path(tempfile.mkdtemp(dir=peer._exported(context)[0].parent, prefix=peer._PREFIX))
    peer._exported(context)
    assert left.exists(), "another launch may be filling it"
    now = time.time() + 2 * ABANDONED_SECONDS
    monkeypatch.setattr(abandoned, "time", SimpleNamespace(time=lambda: now))
    folder, _ = peer._exported(context)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_rank_whose_export_is_ready_second_takes_the_first_ones(
    manifest: ModelManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def late(self: Path, target: Path) -> Path:
        target.mkdir()
        (target / "decoder.onnx").write_text("of another rank")
        return real(self, target)

    monkeypatch.setattr(peer, "version", lambda name: "1")
    monkeypatch.setattr(peer, "_export", lambda context, folder: (folder / "decoder.onnx").write_text("own"))
    monkeypatch.setattr(Path, "rename", late)
    cell = Cell(model=manifest.identity, workload=WORK, layout=Layout(), dtype="float32", engine="onnxruntime")
    job: Any = SimpleNamespace(cache=str(tmp_path), cell=cell)
    folder, _ = peer._exported(SimpleNamespace(job=job, manifest=manifest))  # type: ignore[arg-type]
    assert (folder / "decoder.onnx").read_text() == "of another rank"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        ("kill -KILL $$", MemoryError, r"the export was killed \(SIGKILL\)"),
        ("kill -SEGV $$", RuntimeError, "the export was ended by SIGSEGV"),
        ("exit 2", NotImplementedError, "the model was not exported: no operator"),
    ],
)
def test_an_export_that_a_signal_ends_says_nothing_of_the_model(
    end: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\necho no operator >&2\n{end}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    job: Any = SimpleNamespace(manifest="manifest.json", cell=Cell(model="folder:0", workload=WORK))
    with pytest.raises(error, match=said):
        peer._export(SimpleNamespace(job=job), tmp_path)  # type: ignore[arg-type]
