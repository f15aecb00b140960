"""Load weights from safetensors files or a seed, and save a model as a Hugging Face folder.

A checkpoint that does not match is rejected, naming the tensor and the file. Only safetensors are read, because
unpickling can run arbitrary code (convert with `engine.tools.convert`). Each tensor of a synthetic model has its own
generator, so that it is the same on every rank.

    model = loaded_once(context, build)             # once per launch
    figures = load_figures(context)                 # load_seconds only in the measurement that loaded
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.common.base import write_atomically
from configs.common.files.flushing import flush_file
from configs.common.files.reading import PLAN_BYTES, read_json
from configs.families.checkpoint import TRAINED, check_tensors, check_workload, with_stored_head
from configs.families.config import ModelConfig
from configs.families.tensors import embedding_name, names_in_file
from configs.plans.model_manifest import WEIGHT_INDEX, ModelManifest, is_adapter
from configs.records.record import Figure
from engine.context import Context
from engine.loading import TensorSlice, read_pieces, tensor_locations
from engine.models.llama import Llama
from engine.rank.host_usage import take_peak

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KEPT = "model"
_HEAD = "lm_head.weight"


@dataclass
class LoadedWeights:
    """The model of a launch, and its load figures; `reported` once a measurement has reported them.

    variant: the modified form (its classes), if a launch may measure several.
    """

    model: nn.Module
    seconds: float
    file_bytes: int | None
    digest: str
    variant: Any = None
    peak_bytes: int | None = None
    reported: bool = False


def loaded_once(context: Context, build: Callable[[], tuple[nn.Module, int | None]], variant: Any = None) -> nn.Module:
    """Return the launch's model: built by the first call, reused for the same variant.

    build: returns a model, and bytes read from its files. Raises ValueError for a model that cannot be loaded.
    """
    loaded = context.kept.get(_KEPT)
    if loaded is None or loaded.variant != variant:
        began = time.perf_counter()
        model, file_bytes = build()
        seconds = time.perf_counter() - began
        loaded = context.kept[_KEPT] = LoadedWeights(model, seconds, file_bytes, weights_hash(model), variant)
        if context.memory_pass:
            # Loading may need more memory temporarily than the work. Reset, so that it does not hide the work's peak.
            loaded.peak_bytes = take_peak(context.device)
    assert isinstance(loaded, LoadedWeights)
    return loaded.model


def load_figures(context: Context) -> dict[str, Figure]:
    """Return figures of the loaded model. `load_seconds` and `load_bytes` are None except in the first call.

    `load_bytes` counts tensors as stored in the files; None for a synthetic model, which has none.
    """
    loaded = context.kept[_KEPT]
    first, loaded.reported = not loaded.reported, True
    return {
        "load_seconds": loaded.seconds if first else None,
        "load_bytes": loaded.file_bytes if first else None,
        **({"load_peak_memory_bytes": loaded.peak_bytes} if context.memory_pass else {}),
        "weights_hash": loaded.digest,
        **size_figures(loaded.model),
    }


def size_figures(model: torch.nn.Module) -> dict[str, Figure]:
    """Return parameters and their bytes; tied ones count once."""
    return {
        "model_parameters": sum(tensor.numel() for tensor in model.parameters()),
        "weights_bytes": sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()),
    }


def required_manifest(context: Context) -> ModelManifest:
    """Return the manifest of a workload with a model. Raises ValueError if the cell names no model."""
    if context.manifest is None:
        raise ValueError("models: this workload runs a model; name one")
    return context.manifest


def check_kind(context: Context, workload: str) -> ModelConfig:
    """The model's configuration. Raises ValueError where a model of this kind has another workload."""
    manifest = required_manifest(context)
    config = ModelConfig.parse(manifest.config)
    check_workload(config, workload, manifest.identity)
    return config


def build_model(manifest: ModelManifest, dtype: torch.dtype, device: torch.device) -> tuple[Llama, int | None]:
    """Build the manifest's model for training; return it and the bytes of its tensors in the files (None: synthetic).

    Raises ValueError for a family that is supported for inference only.
    """
    config, file_bytes = ModelConfig.parse(manifest.config), None
    if config.family not in TRAINED:
        raise ValueError(
            f"{manifest.identity}: model_type {config.family!r} is not trained here; use one of: {', '.join(TRAINED)}"
        )
    if config.activation != "silu":
        raise ValueError(f"{manifest.identity}: hidden_act {config.activation!r} is not trained here; use silu")
    if manifest.synthetic_seed is not None:
        tensors = {
            name: synthetic_tensor(config, name, shape, manifest.synthetic_seed).to(device, dtype)
            for name, shape in config.tensor_shapes().items()
        }
    else:
        files = weight_files(manifest)
        stored = tensor_locations(files)
        said, config = config, with_stored_head(config, stored)
        file_bytes = check_tensors(config, stored)
        ours = {theirs: name for name, theirs in names_in_file(config, stored).items()}
        tensors = {
            ours[piece.name]: tensor.to(device, dtype) for piece, tensor in read_pieces(files, map(TensorSlice, ours))
        }
        if said.tied and not config.tied and torch.equal(tensors[_HEAD], tensors[embedding_name(config)]):
            # A copy of the embedding: tied, and so trained as one.
            config = said
            del tensors[_HEAD]
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False).eval(), file_bytes


def synthetic_tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random weights in float32, determined by seed and name: matrices are normal(0, initializer_range).

    In the Llama family norms are one and biases zero, as in a new model; in the others both are perturbed, so that
    tests can detect an error in them.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) >> 1
    generator = torch.Generator().manual_seed(number)
    middle = 0.0 if len(shape) > 1 or name.endswith(".bias") else 1.0 - config.norm_offset
    if len(shape) == 1 and config.family in TRAINED:
        return torch.full(shape, middle)
    # The biases of relative positions are added to scores, which are much larger than a weight.
    spread = 0.5 if "relative" in name else config.initializer_range
    return torch.empty(shape).normal_(middle, spread, generator=generator)


def write_folder(manifest: ModelManifest, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a synthetic model of any family as a folder that transformers loads: config.json and model.safetensors."""
    assert manifest.synthetic_seed is not None
    config = ModelConfig.parse(manifest.config)
    tensors = {
        name: synthetic_tensor(config, name, shape, manifest.synthetic_seed).to(dtype)
        for name, shape in config.tensor_shapes().items()
    }
    write_weights(tensors, manifest.config, folder, dtype)


class HashedWeights:
    """Incremental hash of weights, added one at a time in any order.

    `seconds` is the hashing time so far, which is reported separately from loading.
    """

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}
        self.seconds = 0.0

    def add(self, name: str, tensor: Tensor, part: str = "") -> None:
        """Add a tensor, or a `part` of it. `torch.hash_tensor` is the exclusive or of a row's values."""
        began = time.perf_counter()
        rows = tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.flatten(1).contiguous()
        if rows.shape[1] * rows.element_size() % 8 == 0:
            rows = rows.view(torch.int64)  # five times as fast as 16 bits at a time
        self._rows[f"{name}{tuple(tensor.shape)}{part}"] = torch.hash_tensor(rows, dim=-1).cpu().numpy().tobytes()
        self.seconds += time.perf_counter() - began

    def digest(self) -> str:
        """Return 16 hexadecimal digits over names, shapes and values."""
        digest = hashlib.sha256()
        for name, rows in sorted(self._rows.items()):
            digest.update(name.encode() + rows)
        return digest.hexdigest()[:16]


def weights_hash(model: torch.nn.Module) -> str:
    """Return 16 hexadecimal digits over names, shapes and values, to compare ranks and records of one precision.

    It takes less time than reading, and does not detect two values swapped within a row.
    """
    hashed = HashedWeights()
    for name, parameter in model.named_parameters():
        hashed.add(name, parameter.detach())
    return hashed.digest()


def write_weights(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors in `dtype`; the tensors must have it already."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / ".model.safetensors.tmp"
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)
        flush_file(unfinished)
        unfinished.replace(folder / "model.safetensors")
    finally:
        unfinished.unlink(missing_ok=True)
    written = {name: value for name, value in config.items() if name != "torch_dtype"}
    written["dtype"] = str(dtype).removeprefix("torch.")
    write_atomically(folder / "config.json", json.dumps(written, indent=2) + "\n")


def weight_files(manifest: ModelManifest) -> list[Path]:
    """Return the safetensors files of a model. Raises ValueError if there are none, or one is truncated or missing."""
    folder = Path(manifest.folder)
    if (folder / "model.safetensors").is_file():
        # Shards beside it are another copy, as for transformers and the manifest.
        files = [folder / "model.safetensors"]
    elif (folder / WEIGHT_INDEX).is_file():
        files = _indexed_files(folder)
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if not is_adapter(path.name))
    if not files:
        pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        if pickled:
            raise ValueError(
                f"{pickled[0]}: a pickled checkpoint can run any code when it is loaded, so it is refused; "
                f"convert it once: rankwise convert {quote(str(folder))} DESTINATION, and name DESTINATION as the model"
            )
        raise ValueError(f"{folder}: holds no *.safetensors file; fetch the model again or name another folder")
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: is missing; fetch the model again")
        size, listed = path.stat().st_size, manifest.files.get(path.name)
        if listed is not None and listed.size_bytes != size:
            raise ValueError(
                f"{path}: has {size} bytes instead of {listed.size_bytes}, so it is truncated or was changed; "
                "fetch the model again"
            )
    return files


def _indexed_files(folder: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(folder / WEIGHT_INDEX, PLAN_BYTES)["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / WEIGHT_INDEX}: has no readable weight_map ({error}); fetch the model again"
        ) from error
    if outside:
        raise ValueError(f"{folder / WEIGHT_INDEX}: names {outside[0]!r}, which is not a file beside it")
    return [folder / name for name in names]
