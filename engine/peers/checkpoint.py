"""Write a synthetic model as files for all engines: config.json, safetensors in several files, and their index.

    python -m engine.peers.checkpoint ARCHITECTURE SEED FOLDER [FILES]

ARCHITECTURE is one of `configs.hardware.architectures`; weights are random, determined by SEED, in bfloat16. FILES (2)
files get about the same number of bytes each, in the order in which the model uses them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from configs.common.base import write_atomically
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import WEIGHT_INDEX, ModelManifest
from engine.models.weights import build_model


def write_checkpoint(config: dict[str, Any], seed: int, folder: Path, files: int = 2) -> None:
    """Write the model into a folder. Raises ValueError if that contains weights already."""
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: holds weights already, which are not written over; name an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    identity = f"synthetic:written@{seed}"
    manifest = ModelManifest(identity=identity, source="synthetic", folder="", files={}, config=config)
    model, _ = build_model(manifest, torch.bfloat16, torch.device("cpu"))
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    shares: list[dict[str, Tensor]] = [{} for _ in range(files)]
    before = 0
    for name, tensor in tensors.items():
        shares[before * files // total][name] = tensor
        before += tensor.nbytes
    places: dict[str, str] = {}
    for number, share in enumerate(shares, 1):
        name = f"model-{number:05}-of-{files:05}.safetensors"
        save_file(share, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
        places |= dict.fromkeys(share, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_atomically(folder / WEIGHT_INDEX, json.dumps(index, indent=2) + "\n")
    write_atomically(folder / "config.json", json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    """Return exit code 0 (written) or 2 (rejected)."""
    if len(arguments) not in (3, 4) or arguments[0] not in ARCHITECTURES:
        print("usage: python -m engine.peers.checkpoint ARCHITECTURE SEED FOLDER [FILES]", file=sys.stderr)
        print(f"architectures: {', '.join(ARCHITECTURES)}", file=sys.stderr)
        return 2
    try:
        files = int(arguments[3]) if len(arguments) == 4 else 2
        write_checkpoint(ARCHITECTURES[arguments[0]], int(arguments[1]), Path(arguments[2]), files)
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
