"""Names of a model's files stay below its folder, whoever wrote the manifest or the bundle."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.plans.model_manifest import read_model_manifest
from configs.serving.deployment import ServingBundle

FILE = {"sha256": "0", "size_bytes": 1}


def manifest(name: str) -> dict[str, Any]:
    return {"identity": "folder:0", "source": "folder", "folder": "files", "files": {name: FILE}, "config": {}}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", "."])
def test_a_file_outside_the_models_folder_is_refused(tmp_path: Path, name: str) -> None:
    """`rankwise manifest compose` of a foreign bundle copied it, to a place outside of `--out`."""
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest(name)))
    with pytest.raises(ValueError, match="expected the name of a file below the model's folder"):
        read_model_manifest(path)
    given = {"id": "b", "model": "m", "identity": "folder:0", "manifest": str(path), "kind": "decoder"}
    with pytest.raises(ValueError, match="expected the name of a file below the model's folder"):
        ServingBundle.model_validate(given | {"files": {name: FILE}})


@pytest.mark.parametrize("name", ["model.safetensors", "1_Pooling/config.json", "with blank..json"])
def test_a_file_below_it_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(name)))
    assert list(read_model_manifest(tmp_path / "manifest.json").files) == [name]
