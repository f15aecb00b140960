"""Search how to serve a model with an engine: ranks, stages, replicas, batch, and prefill apart from decode.

    wish = ServingRequest("vllm", architecture, machine, prompt_tokens=1024, new_tokens=256,
                          ttft_seconds=0.5, tpot_seconds=0.05)
    front = pareto_front(services(wish, shipped()))       # tokens/s of a user against tokens/s of a device

Together: a replica computes the prompts of new sequences between decode steps, so a sequence waits for the prompts of
the others: N tokens of n sequences take N steps and n prompts. Apart: other replicas compute the prompts and hand the
cache over (its transfer is not counted); there are as many of them as the decoding ones need. Stages of a pipeline work
on a share of the batch each. Devices that a layout leaves idle count: they are paid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from configs.common.arrays import Floats
from configs.common.system.blas import one_blas_thread
from configs.hardware.hardware import Machine
from engine.planner.architecture import Architecture
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.fit import most_informative, predicted_logs
from engine.planner.engines.kept import kept_tokens
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.schedule import cache_tokens
from engine.planner.engines.work import PhaseWork
from engine.planner.setup import WeightFormat

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_STAGES = (1, 2, 4, 8)


@dataclass(frozen=True)
class ServingRequest:
    """What is to be served, on what, and how fast. ttft_seconds, tpot_seconds: None: any."""

    engine: str
    architecture: Architecture
    machine: Machine
    prompt_tokens: int
    new_tokens: int
    devices: int
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    weights: WeightFormat = "bfloat16"
    batches: tuple[int, ...] = DEFAULT_BATCHES


@dataclass(frozen=True)
class ServingLayout:
    """One way to serve. prefill_ranks: of a replica for prompts alone, None: together. spread: of seconds, 90 %.

    devices: all of them, of which the layout may leave some idle. tokens_per_second: new tokens of all replicas.
    usd_per_million_tokens: of whole machines.
    """

    point: BatchPoint
    devices: int
    replicas: int
    prefill_ranks: int | None
    prefill_replicas: int
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float
    spread: float

    @property
    def usd_per_million_tokens(self) -> float | None:
        """None where the machine has no price."""
        machine = self.point.machine
        if machine.usd_per_hour is None:
            return None
        return ceil(self.devices / machine.accelerators) * machine.usd_per_hour / 3600 / self.tokens_per_second * 1e6

    @property
    def used_devices(self) -> int:
        """Those that compute."""
        return self.replicas * self.point.tp * self.point.pp + self.prefill_replicas * (self.prefill_ranks or 0)

    @property
    def tokens_per_second_per_device(self) -> float:
        """Over all devices."""
        return self.tokens_per_second / self.devices

    @property
    def tokens_per_second_per_user(self) -> float:
        """Of one sequence."""
        return 1 / self.tpot_seconds


@dataclass(frozen=True)
class _Speed:
    """Seconds of a replica: one decode step of the whole batch, and a prompt token."""

    point: BatchPoint
    step_seconds: float
    prompt_token_seconds: float
    spread: float


@one_blas_thread()
def services(wish: ServingRequest, calibrated: CalibratedEngines) -> list[ServingLayout]:
    """Return every way that fits and is fast enough, the highest throughput of a device first."""
    speeds = _speeds(list(_points(wish)), calibrated)
    found = [service for speed in speeds for service in _ways(wish, speed, speeds)]
    fast = [
        service for service in found
        if (wish.ttft_seconds is None or service.ttft_seconds <= wish.ttft_seconds)
        and (wish.tpot_seconds is None or service.tpot_seconds <= wish.tpot_seconds)
    ]  # fmt: skip
    return sorted(fast, key=lambda service: -service.tokens_per_second_per_device)


def pareto_front(found: Sequence[ServingLayout]) -> list[ServingLayout]:
    """Return the services that no other beats in both tokens/s of a user and of a device, the fastest user first."""
    front: list[ServingLayout] = []
    for service in sorted(found, key=lambda one: (one.tpot_seconds, -one.tokens_per_second_per_device)):
        if not front or service.tokens_per_second_per_device > front[-1].tokens_per_second_per_device * 1.001:
            front.append(service)
    return front


@one_blas_thread()
def best_measurement(
    wish: ServingRequest, calibrated: CalibratedEngines, answer: ServingLayout
) -> tuple[BatchPoint, float]:
    """Return the point to measure that would narrow the answer most, and the share of the spread that stays."""
    candidates = [
        replace(answer.point, batch=batch, tp=tp, pp=1) for tp in _ranks(wish) for batch in (1, 16, 64)
    ]  # fmt: skip
    fitting = [one for one in candidates if _room(one) >= 1] or [answer.point]  # some models fit on several stages only
    point, left = most_informative(calibrated.fitted, answer.point, fitting)
    return point, float(np.sqrt(left))


def _ranks(wish: ServingRequest) -> list[int]:
    most = min(wish.machine.joined_ranks, wish.devices, wish.architecture.heads)
    return [tp for tp in (1, 2, 4, 8, 16, 32, 64) if tp <= most and wish.architecture.splits(tp)]


def _room(point: BatchPoint) -> float:
    """Return how many sequences the cache holds; 0 where the weights do not fit."""
    try:
        return cache_tokens(point) / kept_tokens(point, point.context)
    except ValueError:
        return 0.0


def _points(wish: ServingRequest) -> Iterator[BatchPoint]:
    for tp in _ranks(wish):
        for pp in _STAGES:
            if tp * pp > wish.devices or pp > wish.architecture.layers:
                continue
            one = BatchPoint(
                wish.engine, wish.architecture, wish.machine, tp, 1, wish.prompt_tokens, wish.new_tokens, wish.weights,
                pp=pp,
            )  # fmt: skip
            room = _room(one)
            yield from (replace(one, batch=batch) for batch in wish.batches if pp <= batch <= room)


def _speeds(points: Sequence[BatchPoint], calibrated: CalibratedEngines) -> list[_Speed]:
    if not points:
        return []
    # A stage works on a share of the batch, and a token passes all stages.
    shares = [replace(point, batch=max(1, point.batch // point.pp)) for point in points]
    work = PhaseWork.of(shares)
    forecasts = calibrated.forecast(shares)
    whole = np.exp(predicted_logs(calibrated.fitted, shares, work))
    nearby = np.array([forecast.seconds for forecast in forecasts]) / whole  # the correction from measured rows
    steps = _seconds(calibrated, shares, replace(work, prefilled=np.zeros(len(shares))))
    prompts = _seconds(calibrated, shares, replace(work, steps=np.zeros_like(work.steps)))
    found = []
    for at, point in enumerate(points):
        tokens = shares[at].batch * point.prompt_tokens
        step, token = nearby[at] * steps[at] / point.new_tokens, nearby[at] * prompts[at] / tokens
        found.append(_Speed(point, float(step), float(token), forecasts[at].high / forecasts[at].seconds))
    return found


def _seconds(calibrated: CalibratedEngines, points: Sequence[BatchPoint], work: PhaseWork) -> Floats:
    return np.asarray(np.exp(predicted_logs(calibrated.fitted, points, work)))


def _ways(wish: ServingRequest, speed: _Speed, speeds: Sequence[_Speed]) -> Iterator[ServingLayout]:
    """Yield a replica that does both, and with prompts computed elsewhere."""
    point, new = speed.point, wish.new_tokens
    ranks = point.tp * point.pp
    prompt = wish.prompt_tokens * speed.prompt_token_seconds
    # Stages compute prompts at once, so a replica's prompts take a stage's share of the time.
    each = speed.step_seconds + point.batch * prompt / point.pp / new
    together = wish.devices // ranks, 0
    yield _service(wish, speed, together, None, prompt + speed.step_seconds, each)
    requests = point.batch / (new * speed.step_seconds)
    for other in speeds:
        if other.point.batch != 1 or other.point.pp != 1:
            continue
        alone = wish.prompt_tokens * other.prompt_token_seconds
        count, prefills = _whole_replicas(wish.devices, ranks, other.point.tp, requests * alone)
        if count:
            yield _service(wish, speed, (count, prefills), other.point.tp, alone, speed.step_seconds)


def _whole_replicas(devices: int, ranks: int, prefill_ranks: int, needed: float) -> tuple[int, int]:
    """Return how many replicas decode and how many compute their prompts; none where the devices do not suffice.

    needed: replicas for the prompts of one that decodes, a fraction.
    """
    for count in range(int(devices / (ranks + needed * prefill_ranks)), 0, -1):
        prefills = ceil(count * needed)
        if count * ranks + prefills * prefill_ranks <= devices:
            return count, prefills
    return 0, 0


def _service(
    wish: ServingRequest, speed: _Speed, replicas: tuple[int, int], prefill: int | None, ttft: float, tpot: float
) -> ServingLayout:
    """Return the layout. replicas: that decode, and of prompts alone."""
    rate = replicas[0] * speed.point.batch / tpot
    return ServingLayout(speed.point, wish.devices, replicas[0], prefill, replicas[1], ttft, tpot, rate, speed.spread)
