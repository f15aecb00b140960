"""Models for training: our Llama for its families, transformers' for all others.

    model = fresh_model(context, lambda device: transformers_model("AutoModelForMaskedLM", context, device))

For the Llama family the engine imports no transformers while it measures. For other families the trained model *is*
transformers', whose code is then part of the measurement. Dropout is off in both, so that a step is the same on any
number of ranks; the exported configuration keeps its original values.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from configs.families.checkpoint import is_trained_here
from configs.families.numbers import MAX_SIZE, size_of
from configs.families.positions import trained_positions
from configs.plans.model_manifest import ModelManifest
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.pretrained import check_files, check_loaded, is_head
from engine.models.weights import build_model, loaded_once, required_manifest, weight_files
from engine.rank.failures import one_line

_NOISE = ("drop", "jitter_noise", "jitter_eps")
"""In names of rates in transformers' configurations: what is drawn anew in each step."""
_LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
"""Classes whose head belongs to the pretrained model, not to the task."""


def fresh_model(
    context: Context, build: Callable[[torch.device], tuple[nn.Module, int | None]], variant: Any = None
) -> nn.Module:
    """Return a model with its initial weights, in float32, with gradients but for what `build` freezes, on its device.

    Each measurement of a launch gets a new copy, because a strategy may shard or wrap it in place. The original is kept
    on the CPU; a launch of a single measurement (such as the memory pass) keeps none. variant: the modified form of the
    model; measurements may differ in it.
    """
    alone = len(context.job.measurements) == 1
    model = loaded_once(context, lambda: build(context.device if alone else torch.device("cpu")), variant)
    if not alone:
        model = copy.deepcopy(model).to(context.device)
    return model.train()


def own_model(context: Context) -> bool:
    """Return whether `engine.models.llama` implements the model."""
    return is_trained_here(required_manifest(context).config)


def llama(context: Context, device: torch.device) -> tuple[nn.Module, int | None]:
    """Return our model and the bytes of its files."""
    model, file_bytes = build_model(required_manifest(context), torch.float32, device)
    return model.requires_grad_(True), file_bytes


def transformers_model(
    kind: str, context: Context, device: torch.device, changes: dict[str, Any] | None = None
) -> tuple[nn.Module, int | None]:
    """Return transformers' model of a class such as `AutoModelForMaskedLM`, and the bytes of its files (None:
    synthetic).

    Weights without a file (all of a synthetic model, the head of a task) are initialised by transformers with the
    model's seed or the study's: the same on every rank. Those that the class freezes stay so (Marian's positions).
    changes: to the configuration. Only local files are read, and no code of a repository is run. Raises ValueError for
    a model without this class, and for one whose files lack other weights than those.
    """
    import transformers

    manifest, auto = required_manifest(context), getattr(transformers, kind)
    seed, loaded = manifest.synthetic_seed, None
    if seed is None:
        check_files(manifest)
    try:
        with _quiet():
            config = transformers_config(manifest, changes)
    except Exception as error:  # a library that validates has errors of its own
        raise ValueError(f"{manifest.identity}: transformers makes no {kind} of it ({one_line(error)})") from error
    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.job.measuring.seed if seed is None else seed)
            if seed is not None:
                model, file_bytes = auto.from_config(config, dtype=torch.float32), None
            else:
                files = weight_files(manifest)
                file_bytes = sum(path.stat().st_size for path in files)
                model, loaded = auto.from_pretrained(
                    manifest.folder,
                    config=config,
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # a head with another number of classes is skipped
                )
    except (ValueError, KeyError) as error:
        raise ValueError(f"{manifest.identity}: transformers makes no {kind} of it ({one_line(error)})") from error
    if loaded is not None:
        check_loaded(model, loaded, manifest.identity, None if kind in _LANGUAGE_MODELS else is_head)
    made: nn.Module = model.to(device)
    return made, file_bytes


def transformers_config(manifest: ModelManifest, changes: dict[str, Any] | None = None) -> Any:
    """Return transformers' configuration of a model, with dropout and the noise of routers off."""
    from transformers import AutoConfig

    said = {name: value for name, value in manifest.config.items() if name not in ("dtype", "torch_dtype")}
    if "model_type" not in said:
        raise ValueError("its config.json has no model_type")
    config = AutoConfig.for_model(**said | (changes or {}))
    _make_deterministic(config)
    if config.architectures is None:
        config.architectures = []  # searched where a model has several classes of a kind (DeiT)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return config


def _make_deterministic(config: Any) -> None:
    """Set dropout rates and routers' jitter to zero, those of each stage (CvT) and of parts (an encoder) too."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _make_deterministic(value)
        elif not any(part in name for part in _NOISE):
            continue
        elif isinstance(value, list | tuple) and all(isinstance(rate, int | float) for rate in value):
            setattr(config, name, type(value)(type(rate)(0) for rate in value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, type(value)(0))  # a field of whole numbers takes no other


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable network access and warnings about new heads."""
    from transformers.utils import logging

    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def without_filling(model: nn.Module) -> nn.Module:
    """Unset the padding token of transformers' model: otherwise every call searches for it.

    For packed rows; the exported configuration keeps its original value.
    """
    config: Any = getattr(model, "config")  # noqa: B009 - no attribute that nn.Module knows
    config.pad_token_id = None
    return model


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in order: the elements of its outermost ModuleLists (an encoder-decoder has two)."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList) and all(any(True for _ in layer.children()) for layer in module):
            found.extend(module)
            return
        for child in module.children():
            look(child)

    look(model)
    return found


def check_length(workload: TrainWorkload, context: Context) -> None:
    """Raise ValueError for sequences longer than the model's maximum; relative positions have none."""
    most = trained_positions(required_manifest(context).config)
    if most is not None and workload.sequence_length > most:
        raise ValueError(
            f"workload.sequence_length: {workload.sequence_length} is more than the model's {most} "
            "(max_position_embeddings)"
        )


def vocabulary_of(context: Context) -> int:
    """Return the vocabulary size. Raises ValueError for a model without one."""
    manifest = required_manifest(context)
    size = manifest.config.get("vocab_size")
    if size is None:
        raise ValueError(f"{manifest.identity}: config.json names no vocab_size, so it learns no text")
    return size_of(size, "vocab_size", MAX_SIZE)


def named_padding(context: Context) -> int | None:
    """Return the padding token that the configuration names; None for one outside the vocabulary (the first Llamas say
    -1).
    """
    given = required_manifest(context).config.get("pad_token_id")
    return given if type(given) is int and 0 <= given < vocabulary_of(context) else None


def padding_of(context: Context) -> int:
    """Return the padding token; 0 where the configuration names none."""
    return named_padding(context) or 0
