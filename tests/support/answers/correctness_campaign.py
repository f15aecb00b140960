"""Judge many clean and many defective runs of our engine; started by benchmarks/correctness.py.

    python tests/support/answers/correctness_campaign.py ANSWERS.jsonl [--clean 100] [--defects 8] [--seed 0]
        [--model FOLDER]

One line of JSON for each judged run: case, setting, dtype, defect (none: a clean run), word, the worst statistic and
how many times its limit it is. Cases are tiny random models; a folder adds a real one.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from engine.models.weights import DTYPES as DTYPES_OF
from engine.parallel.grid import Grid
from reports.correctness.data import answers_of
from reports.correctness.judge import judge_answers
from tests.support.answers.correctness_runs import (
    FAMILIES,
    Case,
    Defect,
    Setting,
    candidate_samples,
    folder_case,
    made_case,
)
from tests.support.planted_defects import DEFECTS

CLEAN = (
    {"batch": 1},
    {"batch": 4},
    {"tp": 2, "batch": 1},
    {"tp": 2, "batch": 8},
    {"tp": 4, "batch": 4},
    {"pp": 2, "batch": 8},
    {"tp": 2, "pp": 2, "batch": 4},
    {"dp": 2, "batch": 4},
)
FAULTY = (
    {"tp": 2, "batch": 4},
    {"tp": 4, "batch": 3},
    {"pp": 2, "batch": 8},
    {"batch": 4},
    {"tp": 2, "pp": 2, "batch": 8},
)
DTYPES = ("float32", "bfloat16")


def judged(case: Case, setting: Setting, defect: Defect | None) -> dict[str, object]:
    """One run as a line. A defect that leaves every bit of the answers as it was is none: `without effect`."""
    samples = candidate_samples(case, setting, defect)
    if defect is not None:
        clean = candidate_samples(case, setting, None)
        same = all(np.array_equal(samples[name], clean[name], equal_nan=True) for name in clean)
        same = same or not _changes_something(case, setting, defect)
    verdict = judge_answers(case.reference, answers_of(samples, case.config.vocabulary), case.noise[setting.dtype])
    nearest = verdict.nearest
    excess = nearest.excess if nearest is not None else math.inf
    return {
        "case": case.name,
        "setting": str(setting),
        "dtype": setting.dtype,
        "defect": None if defect is None else defect.name,
        "word": "without effect" if defect is not None and same else verdict.word,
        "statistic": nearest.name if nearest is not None else verdict.reason,
        "excess": excess if math.isfinite(excess) else None,
    }


def _changes_something(case: Case, setting: Setting, defect: Defect) -> bool:
    """Whether a defect of the weights changes any: rounding a checkpoint of 16 bits to 16 bits does not."""
    if defect.on_tensors is None:
        return True
    for rank in range(setting.dp * setting.tp * setting.pp):
        tensors = {name: tensor.to(DTYPES_OF[setting.dtype], copy=True) for name, tensor in case.tensors.items()}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        defect.on_tensors(tensors, Grid(setting.dp, setting.tp, setting.pp, rank), case.config)
        if any(not torch.equal(tensors[name], before[name]) for name in before):
            return True
    return False


def clean_runs(count: int, seed: int) -> Iterator[dict[str, object]]:
    """`count` clean runs of each dtype: for each model two settings in both."""
    random = np.random.default_rng(seed)
    for number in range(-(-count // 2)):
        prompts = int(random.choice([1, 3, 8, 20]))
        case = made_case(FAMILIES[number % len(FAMILIES)], seed * 1000 + number, prompts)
        for place in random.choice(len(CLEAN), 2, replace=False):
            for dtype in DTYPES:
                chosen = CLEAN[place]
                if chosen.get("dp", 1) <= prompts:
                    yield judged(case, Setting(dtype=dtype, **chosen), None)
                else:
                    yield judged(case, Setting(dtype=dtype), None)


def faulty_runs(models: int, seed: int) -> Iterator[dict[str, object]]:
    """Every defect on so many models, each in one setting that allows it, in both dtypes."""
    for number in range(models):
        case = made_case(FAMILIES[number % len(FAMILIES)], seed * 1000 + 500 + number)
        yield from _each_defect(case, number)


def _each_defect(case: Case, number: int) -> Iterator[dict[str, object]]:
    for place, defect in enumerate(DEFECTS.values()):
        settings = [Setting(**each) for each in FAULTY if defect.possible(case.config, Setting(**each))]
        if not settings:
            continue
        chosen = settings[(place + number) % len(settings)]
        for dtype in DTYPES:
            setting = Setting(chosen.tp, chosen.pp, chosen.dp, chosen.batch, dtype)
            if defect.possible(case.config, setting):
                yield judged(case, setting, defect)


def real_runs(folder: Path) -> Iterator[dict[str, object]]:
    """A real model with texts of its own vocabulary: clean settings, then every defect."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = Path(json.__file__).read_text()
    prompts = [tokenizer.encode(text[start : start + 40 + 30 * (start % 7)]).ids for start in range(0, 6000, 500)]
    case = folder_case(folder, prompts)
    possible = [each for each in CLEAN if case.config.heads % each.get("tp", 1) == 0]
    for dtype in DTYPES:
        for each in possible:
            yield judged(case, Setting(dtype=dtype, **each), None)
    yield from _each_defect(case, 0)


def main() -> None:
    """Write each line when it is known, so that progress can be seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--defects", type=int, default=8, help="models that each defect is planted on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, action="append", default=[], help="folder of a real model")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with asked.answers.open("w") as file:
        runs = [clean_runs(asked.clean, asked.seed), faulty_runs(asked.defects, asked.seed)]
        for line in (line for part in [*runs, *map(real_runs, asked.model)] for line in part):
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
