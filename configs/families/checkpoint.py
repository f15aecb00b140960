"""Judge a model by its config.json and the headers of its weight files, before anything is loaded. No torch.

    config = check_model(data, headers, "generate", "models/mine")      # ValueError says what cannot be measured

The engine calls the parts when it loads; a study is checked with the whole before anything is started
(`tasks.models.judgement`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from configs.common.printable import printable
from configs.families.config import ModelConfig
from configs.families.tensors import embedding_name, head_names, is_unused, names_in_file

WORKLOADS_OF = {"decoder": ("generate", "serve"), "encoder": ("encode",), "encoder_decoder": ("seq2seq",)}
"""The workloads of each kind of model, the one that measures it first."""
TRAINED = ("llama", "mistral", "qwen2", "qwen3")
"""Families that `engine.models.llama.Llama` implements, and that can be trained; all others are for inference only."""


class TensorHeader(Protocol):
    """What a file's header says of one tensor. is_wide: a floating-point format of 16 bits or more."""

    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_wide(self) -> bool: ...


def check_model(data: Mapping[str, Any], stored: Mapping[str, TensorHeader], workload: str, name: str) -> ModelConfig:
    """Return the configuration of a model that our engine can run under a workload.

    stored: headers of all its tensors; empty for a synthetic model. Raises ValueError for an unsupported or
    inconsistent configuration, tensors that are missing or have another shape or format, and a model of another kind.
    """
    config = ModelConfig.parse(dict(data))
    check_workload(config, workload, name)
    if stored:
        config = with_stored_head(config, stored)
        check_tensors(config, stored)
    return config


def check_workload(config: ModelConfig, workload: str, name: str) -> None:
    """Raise ValueError where a model of this kind has another workload."""
    right = WORKLOADS_OF[config.kind]
    if workload not in right:
        article = "a" if config.kind == "decoder" else "an"
        raise ValueError(
            f"workload.kind: {name} is {article} {config.kind.replace('_', '-')} ({config.family}), "
            f"which {workload} cannot measure; use {right[0]}"
        )


def is_trained_here(data: Mapping[str, Any]) -> bool:
    """Return whether our own model is trained of a config.json; else transformers' is."""
    return data.get("model_type") in TRAINED and data.get("hidden_act", "silu") == "silu"


def with_stored_head(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """Return the configuration of the head that is computed: a head in the files beside the embedding is used, even
    where config.json says that it is tied, as transformers does.
    """
    stored = set(names)
    heads = head_names(config) & stored
    if not config.tied or not heads or names_in_file(config, stored)[embedding_name(config)] in heads:
        return config
    return replace(config, tied=False)


def check_tensors(config: ModelConfig, stored: Mapping[str, TensorHeader]) -> int:
    """Return the bytes of the model's tensors in the files.

    Raises ValueError, naming tensor and file, for one that is missing, has another shape or too narrow a format, or is
    not part of the model.
    """
    expected, file_bytes = config.tensor_shapes(), 0
    names = names_in_file(config, stored)
    # Two of our tensors that share one tensor of the file have one shape.
    ours = {theirs: name for name, theirs in names.items()}
    for name, tensor in stored.items():
        if name not in ours:
            if is_unused(config, name):
                continue
            raise ValueError(
                f"{tensor.file}: tensor {printable(name, 100)} is not part of the model that config.json describes"
            )
        shape = expected[ours[name]]
        if tensor.shape != shape:
            raise ValueError(f"{tensor.file}: tensor {name} has the shape {tensor.shape}; config.json asks for {shape}")
        if not tensor.is_wide:
            raise ValueError(f"{tensor.file}: tensor {name} is {tensor.dtype}; use a checkpoint of 16 or 32 bits")
        file_bytes += tensor.nbytes
    missing = [name for name in expected if name not in names]
    if missing:
        places = ", ".join(sorted({str(tensor.file) for tensor in stored.values()})[:3])
        raise ValueError(f"{places}: tensor {missing[0]} is missing, which config.json asks for")
    return file_bytes
