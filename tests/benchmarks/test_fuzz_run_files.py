"""A damaged file of a run folder: the rest is shown, or a sentence names the file; never an error of the program."""

import functools
import io
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import run_files
from benchmarks.fuzz.mutations import inputs
from benchmarks.fuzz.oracle import judge

NAMES = tuple(run_files.seeds())
SEEDS = run_files.seeds()


@functools.cache
def targets() -> dict[str, Callable[[bytes], object]]:
    return run_files.targets()


def compressed(**values: object) -> bytes:
    """A plan with a compression experiment, the values of its second point replaced."""
    document = json.loads(SEEDS["run.plan"][1])
    (experiment,) = (each for each in document["experiments"] if each["kind"] == "compression")
    experiment["points"][1]["values"] |= values
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "values", [{"answers": False}, {"answers": None}, {"compression": ["int8"]}, {"dtype": {}}, {"compression": "x"}]
)
def test_points_of_compression(values: dict[str, object]) -> None:
    assert judge(targets()["run.plan"], compressed(**values)) is None


@pytest.mark.parametrize("name", ["x" * 4096, "../../elsewhere", "", "\x00"])
def test_an_input_that_no_digest_names(name: str) -> None:
    document = json.loads(SEEDS["run.plan"][0])
    (_, scaled, *_) = document["cells"].values()
    scaled["workload"] |= {"prompts": name, "num_prompts": 4}
    assert judge(targets()["run.plan"], json.dumps(document).encode()) is None


def test_every_target_has_seeds() -> None:
    assert targets().keys() == SEEDS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_sound_files_are_shown(name: str) -> None:
    for seed in SEEDS[name]:
        targets()[name](seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 100, b"null", b"[]", b"{}", b"\xff\xfe", b'{"a": ' * 3000, b"9" * 5000, b'{"schema_version": 3}'],
    ids=["empty", "zeros", "null", "list", "object", "not UTF-8", "nested", "long number", "version only"],
)
def test_files_that_hold_nothing_of_use(name: str, data: bytes) -> None:
    assert judge(targets()[name], data) is None


def samples(column: str, values: list[float]) -> bytes:
    """The samples of one rank with other values in a column."""
    content = io.BytesIO()
    with np.load(io.BytesIO(SEEDS["run.samples"][0])) as archive:
        np.savez(content, **{**archive, f"0/{column}": np.asarray(values)})
    return content.getvalue()


def changed(name: str, *path: str | int, value: object) -> bytes:
    """A sound file with another value at a place."""
    document = json.loads(SEEDS[name][0])
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return json.dumps(document).encode()


FOUND = {
    "no number": ("run.samples", samples("pass_seconds", [math.nan] * 4)),
    "no time": ("run.samples", samples("pass_seconds", [0.0] * 4)),
    "negative": ("run.samples", samples("pass_seconds", [-1.0] * 4)),
    "a sum of infinity": ("run.samples", samples("pass_seconds", [1e308] * 4)),
    "the least number": ("run.samples", samples("pass_seconds", [5e-324] * 4)),
    "infinite latency": ("run.samples", samples("request_seconds", [math.inf] * 8)),
    "before the epoch": ("run.record", changed("run.record", "started_at", value="0001-01-01T00:00:00")),
    "the last year": ("run.record", changed("run.record", "finished_at", value="9999-12-31T23:59:59")),
    "years of waiting": ("run.record", changed("run.record", "accounting", "queued_seconds", value=-1e308)),
    "not communication": ("run.plan", changed("run.plan", "experiments", 0, "kind", value="communication")),
    "not compression": ("run.plan", changed("run.plan", "experiments", 0, "kind", value="compression")),
    "a swept field of no other point": (
        "run.plan",
        changed("run.plan", "experiments", 1, "points", 0, "values", value={"batch_siz\u00b2e": 1}),
    ),
    "no points": ("run.plan", changed("run.plan", "experiments", 0, "points", value=[])),
    "no repeats": ("run.plan", changed("run.plan", "repeats", value={})),
}


@pytest.mark.parametrize("case", FOUND)
@pytest.mark.filterwarnings("error")
def test_found_inputs(case: str) -> None:
    name, data = FOUND[case]
    assert judge(targets()[name], data) is None


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files(name: str, data: st.DataObject) -> None:
    """Values exchanged and removed, text cut and spliced: `make fuzz` does the same for hours."""
    assert judge(targets()[name], data.draw(inputs(SEEDS[name]))) is None
