"""A model's manifest: what its files are, by hash, so that every rank loads the same bytes."""

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.common.files.reading import PLAN_BYTES, brief, read_model

WEIGHT_INDEX = "model.safetensors.index.json"
"""The file that names the file of each tensor, where a model has several."""
POOLING = "1_Pooling/config.json"
"""The file in which a model of sentence-transformers says how token states become one vector."""
PROMPTS, TEXT_RULES = "config_sentence_transformers.json", "sentence_bert_config.json"
"""The files in which it says what a text becomes before it is tokenised, and how long it may be."""
MODULES = "modules.json"
"""The file in which it names its parts, in the order in which they are computed."""

ADAPTER = "adapter_config.json"
"""The file in which PEFT says what an adapter (LoRA) changes, and of which model."""
_ADAPTER_WEIGHTS = re.compile(r"adapter_model(-\d+-of-\d+)?\.(safetensors|bin)")


def is_adapter(name: str) -> bool:
    """Return whether a file has the weights of an adapter, which are no part of the model beside them."""
    return _ADAPTER_WEIGHTS.fullmatch(name) is not None


def _below(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"got {brief(name)}, expected the name of a file below the model's folder")
    return name


ModelFileName = Annotated[str, AfterValidator(_below)]
"""Relative to the model's folder and inside of it: files are copied under these names, also from a foreign manifest."""


class ModelFile(Frozen):
    """One file of a model."""

    sha256: str
    size_bytes: int = Field(ge=0)


class ModelManifest(Frozen):
    """What `tasks.fetch` leaves: enough for a node to find, check and load the model.

    `identity` is `repository@commit`, `folder:<hash>` or `synthetic:<architecture>@<seed>`; a
    synthetic model has no weight files: its random weights are made on the node.
    """

    schema_version: int = SCHEMA_VERSION
    identity: str
    source: Literal["hub", "folder", "synthetic"]
    folder: str = Field(description="path of the files; a relative one is below the folder of manifest.json")
    files: dict[ModelFileName, ModelFile]
    config: dict[str, Any] = Field(description="the model's config.json")

    @property
    def synthetic_seed(self) -> int | None:
        """Seed of the random weights; None for a real model."""
        return int(self.identity.rsplit("@", 1)[1]) if self.source == "synthetic" else None


def read_model_manifest(path: Path) -> ModelManifest:
    """A manifest with the absolute path of its files. Raises OSError, and ValueError for what is no manifest."""
    manifest = read_model(path, ModelManifest, PLAN_BYTES)
    return manifest.model_copy(update={"folder": str(path.absolute().parent / manifest.folder)})
