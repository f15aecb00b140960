"""Export a checkpoint as a Hugging Face folder, in one process and without a GPU.

    python -m engine.training.checkpoints.export CHECKPOINT FOLDER [--dtype bfloat16]

CHECKPOINT is a step's folder (runs/<study>/checkpoints/<cell>-r0/step_00000120), or its parent, of which the newest
complete one is used. FOLDER then holds config.json, model.safetensors and the tokenizer, and can be loaded by Rankwise
and transformers. Checkpoints of DeepSpeed ZeRO have the library's format and cannot be exported here: `workload.export`
exports at the end of a run with any strategy.
"""

import argparse
import sys
from pathlib import Path

from configs.plans.model_manifest import WEIGHT_INDEX
from engine.models.weights import DTYPES, write_weights
from engine.rank.failures import log_line
from engine.training.checkpoints.files import EXPORT, MANIFEST, newest_whole, read_checkpoint, read_checkpoint_progress
from engine.training.checkpoints.saving import read_tensors
from engine.training.task_types.common import exported_tensor, write_tokenizer


def export(checkpoint: Path, folder: Path, dtype: str = "bfloat16") -> Path:
    """Write the folder; return the step's folder that was exported.

    Raises ValueError for a checkpoint that is incomplete, ZeRO's, or from a custom loop, and for a folder with an index
    of weights, which names those of another model; OSError.
    """
    if not (checkpoint / MANIFEST).exists():
        found = newest_whole(checkpoint)
        if found.folder is None:
            raise ValueError(f"{checkpoint}: holds no whole checkpoint{''.join(f'; {line}' for line in found.torn)}")
        checkpoint = found.folder
    if (folder / WEIGHT_INDEX).exists():
        raise ValueError(f"{folder}: its {WEIGHT_INDEX} names weights of another model; name another folder")
    manifest = read_checkpoint(checkpoint)
    if manifest.format != "torch":
        raise ValueError(f"{checkpoint}: is in the format of {manifest.format}; export at the end of the run instead")
    told = read_checkpoint_progress(checkpoint).get(EXPORT)
    if told is None:
        raise ValueError(f"{checkpoint}: does not say what model it is of; it was not made by a train workload")
    stored = read_tensors(checkpoint, "model")
    tensors = {name: exported_tensor(stored[name], DTYPES[dtype]) for name in told["names"]}
    write_weights(tensors, told["config"], folder, DTYPES[dtype])
    tokenizer = Path(told["tokenizer"]) if told["tokenizer"] else None
    if tokenizer is not None and not tokenizer.is_file():
        log_line(f"{tokenizer}: not on this machine; {folder} gets no tokenizer, so copy tokenizer.json there")
    write_tokenizer(tokenizer, folder)
    return checkpoint


def main(arguments: list[str]) -> int:
    """Export; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    chosen = parser.parse_args(arguments)
    try:
        source = export(chosen.checkpoint, chosen.folder, chosen.dtype)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{source} -> {chosen.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
