"""What `rankwise load` is asked for, from its options; every error names the option."""

import re
import secrets
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from configs.common.base import WrongArgument
from configs.common.files.reading import parse_json, validation_text
from configs.load.arrivals import Arrivals, ClosedLoop, ConstantArrivals, GammaArrivals, PoissonArrivals, TraceArrivals
from configs.load.job import Caps, Contents, Endpoint, LoadJob
from configs.load.objectives import RequestObjectives
from flows.cli.load.lengths import parse_lengths
from reports.load.search import SearchGoal

DEFAULT_SECONDS = 60.0
_FIRST_RATE = 1.0
_MIN_RATE = 0.01
_HIGHEST_RATE = 10_000.0
_SEEDS = 1 << 31
_ONLY_WITH = {
    "speed": ("trace",),
    "arrivals": ("rate", "find_max_rate"),
    "think": ("users", "turns"),
    "prefixes": ("shared_prefix",),
    "share": ("ttft", "tpot", "e2e"),
    "tolerance": ("find_max_rate",),
    "max_runs": ("find_max_rate",),
}
"""Options that do nothing without one of others."""
_OPTIONS = {
    "url": "URL",
    "duration_seconds": "--duration",
    "max_requests": "--requests",
    "fields": "--field",
    "shared_prefix_tokens": "--shared-prefix",
    **{f"{name}_seconds": f"--{name}" for name in ("think", "timeout", "ttft", "tpot", "e2e")},
}
"""Options that are not named as the field of the job."""
_FIELD = re.compile(r"(?:^|(?<=; ))(?:arrivals\.)?([a-z][a-z0-9_]*)(?=[:.\[])")
"""What a problem of a job begins with."""


class ShapeOptions(NamedTuple):
    """Options of the arrivals."""

    rate: float | None
    users: int | None
    trace: Path | None
    speed: float
    arrivals: str
    burstiness: float
    think_seconds: float


class LoadRequest(NamedTuple):
    """A job, objectives where there are any, and the goal of a search where one is wanted."""

    job: LoadJob
    objectives: RequestObjectives | None
    goal: SearchGoal | None


def refuse_unused(given: Set[str], arrivals: str) -> None:
    """Raise WrongArgument for an option on the command line (by its parameter's name) that would do nothing."""
    for name, others in _ONLY_WITH.items():
        if name in given and not given & set(others):
            raise WrongArgument(f"{_option(name)}: has no effect without {' or '.join(map(_option, others))}")
    if "burstiness" in given and arrivals != "gamma":
        raise WrongArgument("--burstiness: has no effect without --arrivals gamma")
    for name in ("prompt_tokens", "vocabulary"):
        if name in given and "prompts" in given:
            raise WrongArgument(f"{_option(name)}: is of random prompts. Leave it out, or --prompts")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def made_request(
    endpoint: dict[str, Any],
    shape: ShapeOptions,
    contents: dict[str, Any],
    texts: dict[str, str],
    fields: list[str],
    caps: dict[str, Any],
    bounds: dict[str, Any],
    objectives: dict[str, float | None],
    share: float,
    search: tuple[float, int] | None,
) -> LoadRequest:
    """Check the options. search: (tolerance, runs). Raises WrongArgument naming the option."""
    lengths: dict[str, Any] = {name: _lengths(name, texts[name]) for name in ("prompt_tokens", "new_tokens")}
    vocabulary = _vocabulary(texts["vocabulary"])
    further = dict(_field(text) for text in fields)
    asked = _checked(Contents, {**contents, **lengths, "vocabulary": vocabulary, "fields": further})
    bounded = any(bound is not None for bound in objectives.values())
    wanted = _checked(RequestObjectives, {**objectives, "share": share}) if bounded else None
    if search is not None and wanted is None:
        raise WrongArgument("--find-max-rate: expected an objective: --ttft, --tpot or --e2e")
    if search is not None and (shape.users is not None or shape.trace is not None):
        raise WrongArgument("--find-max-rate: open loop only. Leave out --users and --trace")
    for option, file in (("--trace", shape.trace), ("--prompts", contents["prompts"])):
        if file is not None and not Path(file).is_file():
            raise WrongArgument(f"{option}: {file}: expected a file")
    limits: Caps = _checked(Caps, caps)
    if search is not None and shape.rate is None:
        shape = shape._replace(rate=min(_FIRST_RATE, limits.max_rate or _FIRST_RATE))
    arrivals = _arrivals(shape, asked.turns)
    if bounds["duration_seconds"] is None and bounds["max_requests"] is None and shape.trace is None:
        bounds = bounds | {"duration_seconds": DEFAULT_SECONDS}
    if bounds["seed"] is None:  # the prompts of one command are in the server's cache when the next one begins
        bounds = bounds | {"seed": secrets.randbelow(_SEEDS)}
    parts = {"endpoint": _checked(Endpoint, endpoint), "caps": limits}
    job: LoadJob = _checked(LoadJob, {**parts, "contents": asked, "arrivals": arrivals, **bounds})
    return LoadRequest(job, wanted, None if search is None else _goal(search, share, job))


def _goal(search: tuple[float, int], share: float, job: LoadJob) -> SearchGoal:
    tolerance, max_runs = search
    if not 0 < tolerance < 1:
        raise WrongArgument(f"--tolerance: got {tolerance:g}, expected a share above 0 and below 1")
    first = job.requested_rate
    assert first is not None
    highest = job.caps.max_rate or _HIGHEST_RATE
    return SearchGoal(share, first, tolerance, min(_MIN_RATE, first), max(highest, first), max_runs)


def _arrivals(shape: ShapeOptions, turns: int) -> Arrivals:
    given = [
        name for name, value in (("--rate", shape.rate), ("--users", shape.users), ("--trace", shape.trace))
        if value is not None
    ]  # fmt: skip
    if len(given) != 1:
        raise WrongArgument(f"--rate, --users, --trace: expected one of them, got {' and '.join(given) or 'none'}")
    if shape.users is not None:
        closed: ClosedLoop = _checked(ClosedLoop, {"users": shape.users, "think_seconds": shape.think_seconds})
        return closed
    if shape.trace is not None:
        trace: TraceArrivals = _checked(TraceArrivals, {"file": str(shape.trace), "speed": shape.speed})
        return trace
    assert shape.rate is not None
    rate = {"rate": shape.rate / turns}
    if shape.arrivals == "gamma":
        gamma: GammaArrivals = _checked(GammaArrivals, {**rate, "burstiness": shape.burstiness})
        return gamma
    even: PoissonArrivals | ConstantArrivals
    even = _checked(ConstantArrivals if shape.arrivals == "constant" else PoissonArrivals, rate)
    return even


def _lengths(name: str, text: str) -> Any:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise WrongArgument(f"--{name.replace('_', '-')}: {error}") from error


def _vocabulary(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise WrongArgument(f"--vocabulary: got {text[:60]!r}, expected FROM..TO, for example 10..999")
    return int(first), int(last) + 1


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, parse_json(value.encode(), "--field", finite=True)
    except ValueError as error:
        raise WrongArgument(f"--field: got {text[:60]!r}, expected KEY=JSON, for example top_p=0.9") from error


def _checked(model: type[BaseModel], fields: dict[str, Any]) -> Any:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        told = _FIELD.sub(lambda found: _OPTIONS.get(found[1], _option(found[1])), validation_text(error))
        raise WrongArgument(told) from error
