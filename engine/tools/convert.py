"""Convert a pickled checkpoint to safetensors, in a separate process.

    python -m engine.tools.convert SOURCE DESTINATION

SOURCE is a folder with config.json and pytorch_model*.bin. Unpickling can run arbitrary code, so only plain tensors are
unpickled (`weights_only=True`); other contents are rejected. On failure the exit code is 2, with one line on stderr.
Existing files in DESTINATION are never overwritten.
"""

import pickle
import re
import shutil
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
WEIGHTS = "model.safetensors"


def convert(source: Path, destination: Path) -> list[Path]:
    """Convert a folder; return the files written. Raises ValueError or OSError, without having written weights."""
    checkpoints = sorted(source.glob("pytorch_model*.bin"))
    if not checkpoints:
        raise ValueError(f"{source}: holds no pytorch_model*.bin file; name the folder of a pickled checkpoint")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source / 'config.json'}: is missing; a model folder needs it")
    copied = [name for name in COPIED if (source / name).is_file()]
    for name in (WEIGHTS, *copied):
        if (destination / name).exists():
            raise ValueError(f"{destination / name}: exists and is not written over; name an empty folder")
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoints:
        for name, tensor in read_pickled(path).items():
            if name in tensors:
                raise ValueError(f"{path}: tensor {name} stands in an earlier file too")
            tensors[name] = tensor
    destination.mkdir(parents=True, exist_ok=True)
    unfinished = destination / f".{WEIGHTS}.tmp"
    try:
        save_file(_separate(tensors), unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)
        unfinished.replace(destination / WEIGHTS)
    finally:
        unfinished.unlink(missing_ok=True)
    for name in copied:
        shutil.copyfile(source / name, destination / name)
    return [destination / name for name in (WEIGHTS, *copied)]


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one pickled file. Raises ValueError for other contents."""
    try:
        with warnings.catch_warnings(action="ignore"):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message advises unsafe loading; only the requested name is useful.
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"asks for {asked[1]} to be called" if asked else "is not a checkpoint that torch.save wrote"
        raise ValueError(f"{path}: {reason}; refused, nothing of it was run") from error
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error}); fetch it again") from error
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{path}: holds {type(data).__name__}, not a table of named tensors")
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{path}: {name!r} is {type(value).__name__}, not a tensor; export the state dict alone")
    return data


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory, because safetensors stores each separately."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone().contiguous() if storage in seen else tensor.contiguous()
        seen.add(storage)
    return separate


def main(arguments: list[str]) -> int:
    """Return exit code 0 (converted) or 2 (rejected)."""
    if len(arguments) != 2:
        print("usage: python -m engine.tools.convert SOURCE DESTINATION", file=sys.stderr)
        return 2
    try:
        written = convert(Path(arguments[0]), Path(arguments[1]))
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
