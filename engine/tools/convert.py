"""Convert a pickled checkpoint to safetensors, in a separate process.

    python -m engine.tools.convert SOURCE DESTINATION

SOURCE is a folder with config.json and pytorch_model*.bin. Unpickling can run arbitrary code, so only plain tensors are
unpickled (`weights_only=True`); other contents are rejected. Every tensor is read back and compared. On failure the
exit code is 2, with one line on stderr. Existing files in DESTINATION are never overwritten.
"""

import json
import pickle
import re
import shutil
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configs.common.base import write_atomically
from configs.common.files.flushing import flush_file
from configs.common.files.reading import PLAN_BYTES, brief, read_json_object
from configs.common.printable import printable
from configs.plans.model_manifest import MODULES, POOLING, PROMPTS, TEXT_RULES

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "vocab.txt",
    "sentencepiece.bpe.model",
    TEXT_RULES,
    PROMPTS,
    MODULES,
    POOLING,
)
WEIGHTS = "model.safetensors"
WHOLE = "pytorch_model.bin"
_SHARD = re.compile(r"pytorch_model-\d+-of-(\d{1,9})\.bin")
SHARD_BYTES = 2 << 30
"""Maximum size of a file of weights: safetensors copies a file's tensors while it writes them."""


def convert(source: Path, destination: Path) -> list[Path]:
    """Convert a folder; return the files written. Raises ValueError or OSError, without having written weights."""
    there = sorted(path.name for path in source.glob("pytorch_model*.bin"))
    if not there:
        raise ValueError(f"{source}: holds no pytorch_model*.bin file; name the folder of a pickled checkpoint")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source / 'config.json'}: is missing; a model folder needs it")
    checkpoints = [source / name for name in _checkpoint(source, there)]
    copied = [name for name in COPIED if (source / name).is_file()]
    shards = (path.name for path in destination.glob("model-*-of-*.safetensors"))
    for name in (WEIGHTS, f"{WEIGHTS}.index.json", *shards, *copied):
        if (destination / name).exists():
            raise ValueError(f"{destination / name}: exists and is not written over; name an empty folder")
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoints:
        for name, tensor in read_pickled(path).items():
            if name in tensors:
                raise ValueError(f"{path}: tensor {brief(name)} stands in an earlier file too")
            tensors[name] = tensor
    destination.mkdir(parents=True, exist_ok=True)
    written = write_weights(_separate(tensors), destination)
    for name in copied:
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)
    return [*written, *(destination / name for name in copied)]


def _checkpoint(source: Path, names: list[str]) -> list[str]:
    """Return the files of one checkpoint, as transformers chooses them: the whole file, or the shards of the index.

    Others may lie beside them: shards of an earlier number, or the same weights once more. Raises ValueError naming a
    shard that is not there: of those in the index, or those that the names count.
    """
    if WHOLE in names:
        return [WHOLE]
    index = source / f"{WHOLE}.index.json"
    if index.is_file():
        places = read_json_object(index, PLAN_BYTES).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{index}: has no weight_map of tensor names to file names; fetch or save it again")
        if missing := sorted(set(places.values()) - set(names)):
            raise ValueError(f"{source}: {brief(missing[0])} is missing; fetch or copy the checkpoint again")
        if places:
            return sorted(set(places.values()))
    for of, there in Counter(found[1] for name in names if (found := _SHARD.fullmatch(name))).items():
        if there < int(of):
            raise ValueError(
                f"{source}: holds {there} of the {int(of)} files pytorch_model-*-of-{of}.bin; "
                "fetch or copy the checkpoint again"
            )
    return names


def write_weights(tensors: dict[str, torch.Tensor], destination: Path) -> list[Path]:
    """Write tensors as one file, or as shards with their index, and compare each with what is read back."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    unfinished = [destination / f".{name}.tmp" for name in names]
    try:
        for path, shard in zip(unfinished, shards, strict=True):
            try:
                save_file(shard, path, metadata={"format": "pt"})
            except SafetensorError as error:  # also where the disk is full
                raise OSError(f"{path}: cannot be written ({printable(str(error), 300)})") from error
            path.chmod(0o644)
            _compare(path, shard)
            flush_file(path)
        for path, name in zip(unfinished, names, strict=True):
            path.replace(destination / name)
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    written = [destination / name for name in names]
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        written.append(destination / f"{WEIGHTS}.index.json")
        write_atomically(written[-1], json.dumps(index, indent=1) + "\n")
    return written


def _compare(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raise OSError if the file does not hold these tensors, bit by bit."""
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            same = read.dtype == tensor.dtype and read.shape == tensor.shape
            if not same or not torch.equal(_bytes(read), _bytes(tensor)):
                raise OSError(f"{path}: tensor {name} differs from what was written; check the disk")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory: NaN compares equal to itself there."""
    return tensor.reshape(-1).view(torch.uint8)


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one pickled file. Raises ValueError for other contents."""
    try:
        with warnings.catch_warnings(action="ignore"):
            # The older format cannot be mapped into memory.
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # torch's message advises unsafe loading; only the requested name is useful.
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"asks for {asked[1]} to be called" if asked else "is not a checkpoint that torch.save wrote"
        raise ValueError(f"{path}: {reason}; refused, nothing of it was run") from error
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        said = printable(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{path}: cannot be read ({said}); fetch it again") from error
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{path}: holds {type(data).__name__}, not a table of named tensors")
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{path}: {brief(name)} is {type(value).__name__}, not a tensor; export the state dict alone"
            )
        if value.layout is not torch.strided or value.is_quantized or value.dtype is torch.complex128:
            kind = "sparse" if value.layout is not torch.strided else str(value.dtype).removeprefix("torch.")
            raise ValueError(
                f"{path}: tensor {brief(name)} is {kind}, which safetensors cannot hold; save it as floats"
            )
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
