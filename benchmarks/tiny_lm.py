"""Train the quickstart's model again: python -m benchmarks.tiny_lm

Runs the study `benchmarks/studies/tiny_lm.yaml`, which is the project's own training workload, and
puts the trained model, its tokenizer and a model card with the held-out perplexity into
`configs/models/tiny-stdlib`. The tokenizer is kept unless `--new-tokenizer` asks for one learnt from
the standard library of the Python that runs this.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from configs.plans.paths import RunPaths
from configs.records.record import Record, Status
from configs.workloads.train import TrainWorkload
from tasks.campaign.ledger import read_ledger
from tasks.planning.inputs import write_stdlib_text

CONFIGS = Path(__file__).parents[1] / "configs"
MODEL = CONFIGS / "models" / "tiny-stdlib"
STUDY = Path(__file__).parent / "studies" / "tiny_lm.yaml"
_VOCABULARY = 4096

_CARD = """# tiny-stdlib

A small language model of Python source, made to have something real to measure: Llama architecture,
{parameters:,} parameters, byte-level BPE with {vocabulary} tokens, weights in bfloat16.

| | |
| --- | --- |
| trained on | the source of the standard library of Python {python}, as installed, tests left out: {tokens:,} tokens |
| by | `make tiny-lm` (the training workload of this project, study `benchmarks/studies/tiny_lm.yaml`) |
| steps | {steps:,} of {batch} sequences of {length} tokens |
| held out | the last {share:.0%} of the tokens ({heldout:,}) |
| held-out perplexity | {perplexity:.2f} a token |

It completes Python code a little, knows nothing else, and is good for nothing but measuring. The text
that it was trained on is under the PSF licence: https://docs.python.org/3/license.html
"""


def learn_tokenizer() -> None:
    """Learn the tokenizer in a process of its own: the library for it belongs to the engine."""
    MODEL.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / f"{write_stdlib_text(Path(folder))}.txt"
        command = [sys.executable, "-m", "engine.tools.train_tokenizer", str(text), str(_VOCABULARY)]
        subprocess.run([*command, str(MODEL / "tokenizer.json")], check=True)


def trained(run: RunPaths) -> Record:
    """The completed record of the training study."""
    for entries in read_ledger(run).entries.values():
        for entry in entries:
            if entry.status is Status.COMPLETED:
                return entry.record
    raise ValueError(f"{run.folder}: the model was not trained; see report.md there")


def install_model(run: RunPaths, record: Record) -> None:
    """Copy what the training left, and write its card."""
    exported = run.job(record.job).exports / record.key
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(exported / name, MODEL / name)
    (MODEL / "README.md").write_text(model_card(record))


def model_card(record: Record) -> str:
    """The card, its figures from the record."""
    workload, figures = record.cell.workload, record.figures
    assert isinstance(workload, TrainWorkload)
    return _CARD.format(
        parameters=figures["model_parameters"],
        vocabulary=_VOCABULARY,
        python=platform.python_version(),
        tokens=figures["train_tokens"],
        steps=figures["steps"],
        batch=workload.global_batch_size,
        length=workload.sequence_length,
        share=workload.heldout_share,
        heldout=figures["heldout_tokens"],
        perplexity=figures["heldout_perplexity"],
    )


def main() -> int:
    """Train, and install what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--new-tokenizer", action="store_true")
    arguments = parser.parse_args()
    if arguments.new_tokenizer or not (MODEL / "tokenizer.json").exists():
        learn_tokenizer()
    rankwise = Path(sys.executable).with_name("rankwise")
    subprocess.run([str(rankwise), "run", str(STUDY), "--runs", str(arguments.runs)], check=True)
    run = RunPaths((arguments.runs / "tiny-lm").absolute())
    record = trained(run)
    install_model(run, record)
    print(f"{MODEL}: held-out perplexity {record.figures['heldout_perplexity']:.2f} a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
