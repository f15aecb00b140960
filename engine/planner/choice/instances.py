"""Choose an instance for a task: the cheapest a token that fits and reaches the speed, with its alternatives.

    options = options_on(wish, catalog(), Among(kinds=("cuda",)))
    options.best, options.answer()

Instances that differ only in host memory have the same prediction; the cheapest that fits represents them. Instances
without a known price rank after those with one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from configs.hardware.catalog import HardwareCatalog
from configs.hardware.hardware import AcceleratorKind, Machine
from configs.hardware.prices import Market, Price
from engine.planner.architecture import Architecture
from engine.planner.choice.descriptions import GB, framework_of, inference_dict, rate, short, title, training_dict
from engine.planner.choice.machines import inference_format, instance_price, training_precision
from engine.planner.choice.search import LAUNCHABLE, EvaluatedSetup, ranked, with_memory_limit
from engine.planner.results import GenerationTime
from engine.planner.setup import InferenceSetup, TrainingSetup

READING_SECONDS = 0.2
"""Seconds per token at reading speed: 250 words a minute (M. Brysbaert, J. Memory and Language 109, 2019: 238) are 5
tokens/s.
"""


@dataclass(frozen=True)
class InstanceRequest:
    """A task. counts: device counts to try, the first that fits and reaches the speed is taken; batch_size: per GPU, or
    in total for inference.
    """

    architecture: Architecture
    training: bool
    batch_size: int
    counts: tuple[int, ...]
    sequence_length: int
    new_tokens: int
    max_memory_bytes: int | None = None
    min_tokens_per_second: float | None = None
    max_seconds_per_token: float | None = None
    market: Market = "on_demand"
    region: str | None = None


@dataclass(frozen=True)
class InstanceOption:
    """An instance, a device count, and the fastest setup there; `why_not` if there is none."""

    machine: Machine
    count: int
    candidate: EvaluatedSetup | None
    price: Price | None
    too_slow: str | None = None
    why_not: str | None = None

    @property
    def fits(self) -> bool:
        """Whether any setup fits."""
        return self.candidate is not None and self.candidate.fits

    @property
    def nodes(self) -> int:
        """Instances needed for this many devices."""
        return -(-self.count // self.machine.accelerators)

    @property
    def where(self) -> str:
        """Name the instance, and how many of them where there are several."""
        return f"{self.nodes} x {self.machine.name}" if self.nodes > 1 else self.machine.name

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """Sort key: fits, reaches the speed, has a price; then dollars a token, or the speed without a price."""
        tokens = _speed(self)
        usd = self.candidate.usd_per_million_tokens if self.candidate else None
        return not self.fits, self.too_slow is not None, usd is None, -tokens if usd is None else usd

    def as_dict(self) -> dict[str, Any]:
        """Return the table row of this option."""
        described: dict[str, Any] = {"title": None, "fits": False}
        if self.candidate is not None:
            training = isinstance(self.candidate.setup, TrainingSetup)
            described = training_dict(self.candidate) if training else inference_dict(self.candidate)
        price = self.price
        return described | {
            "accelerator": self.machine.accelerator.name,
            "hardware": self.machine.accelerator.kind,
            "instance": self.machine.name,
            "nodes": self.nodes,
            "gpu_count": self.count,
            "usd_per_hour": price and price.usd_per_hour * self.nodes,
            "price_market": price and price.market,
            "price_region": price and price.region,
            "price_as_of": price and price.as_of,
            "price_source": price and price.source,
            "too_slow": self.too_slow,
            "why_not": self.why_not or described.get("why_not"),
        }


@dataclass(frozen=True)
class InstanceOptions:
    """All options, the best first."""

    ordered: tuple[InstanceOption, ...]

    @property
    def best(self) -> InstanceOption | None:
        """The best option; None if no option both fits and reaches the speed."""
        first = self.ordered[0] if self.ordered else None
        return first if first is not None and first.fits and first.too_slow is None else None

    @property
    def any_gpu(self) -> bool:
        """Whether a GPU option is feasible; also true if no GPU was considered."""
        gpus = [option for option in self.ordered if option.machine.accelerator.kind != "cpu"]
        return not gpus or any(option.fits for option in gpus)

    def answer(self) -> dict[str, Any]:
        """Return `primary_recommendation` and the related keys."""
        usable = [option for option in self.ordered if option.fits and option.too_slow is None]
        # CPUs of one family count as one choice, regardless of cores.
        families = {_family(option): option.machine.accelerator.name for option in reversed(usable)}
        names = list(dict.fromkeys(families[_family(option)] for option in usable))
        best = self.best
        row = best.as_dict() if best else {}
        several = best is not None and best.count > 1
        setup = best.candidate.setup if best and best.candidate else None
        strategy = framework_of(setup) if isinstance(setup, TrainingSetup) else setup and title(setup)
        return {
            "primary_recommendation": names[0] if names else None,
            "hardware": row.get("hardware"),
            "instance": row.get("instance"),
            "nodes": row.get("nodes"),
            "gpu_count": row.get("gpu_count"),
            "distributed_strategy": strategy if several else None,
            "fallback_options": names[1:6],
            "explanation": self.explanation(),
            "options": [option.as_dict() for option in usable if option.price is not None],
            "without_price": [option.as_dict() for option in usable if option.price is None],
            "too_slow": [option.as_dict() for option in self.ordered if option.fits and option.too_slow],
            "does_not_fit": [option.as_dict() for option in self.ordered if not option.fits],
            "recommendation": row or None,
        }

    def explanation(self) -> str:
        """Return a sentence with the choice, its speed and price, and the runner-up."""
        best = self.best
        if best is None or best.candidate is None:
            return self._nothing()
        speed = f"{rate(best.candidate.tokens_per_second or 0.0)} tokens/s"
        usd = best.candidate.usd_per_million_tokens
        device = best.machine.accelerator.name
        if usd is None:
            return f"{best.where} ({device}) is predicted to reach {speed}; no price of it is known."
        said = f"{best.where} ({device}) costs least a token: {speed} at ${short(usd)} per million tokens"
        others = [option for option in self.ordered[1:] if option.fits and option.too_slow is None]
        other = next((o for o in others if o.machine.accelerator.name != best.machine.accelerator.name), None)
        if other is None or other.candidate is None or other.candidate.usd_per_million_tokens is None:
            return said + "."
        return f"{said}; next is {other.where} at ${short(other.candidate.usd_per_million_tokens)}."

    def _nothing(self) -> str:
        if not self.ordered:
            return "No instance of the catalog is of these providers and kinds of hardware."
        first = self.ordered[0]
        if first.fits:
            fastest = max((option for option in self.ordered if option.fits), key=_speed)
            return f"Nothing is fast enough; the nearest, {fastest.where}, {fastest.too_slow}."
        reasons = [option for option in self.ordered if option.candidate is not None]
        nearest = min(reasons, key=_lacking, default=first)
        why = nearest.as_dict()["why_not"]
        return f"Nothing fits; the nearest, {nearest.count} x {nearest.machine.accelerator.name}, {why}."


@dataclass(frozen=True)
class Among:
    """Filter for instances. providers as in `aws/p5.48xlarge`, accelerators by name; None: all."""

    providers: tuple[str, ...] | None = None
    kinds: tuple[AcceleratorKind, ...] = ("cuda", "rocm", "cpu")
    accelerators: frozenset[str] | None = None

    def has(self, machine: Machine) -> bool:
        """Return whether an instance passes the filter."""
        named = self.accelerators is None or machine.accelerator.name in self.accelerators
        offered = self.providers is None or machine.name.split("/")[0] in self.providers
        return offered and machine.accelerator.kind in self.kinds and named


def search_instances(
    wish: InstanceRequest, hardware: HardwareCatalog, among: Among, widen: bool = False
) -> tuple[InstanceOptions, list[str]]:
    """Search options; also return remarks on assumptions.

    widen: try several GPUs if no single one holds the model. If no generation speed is given, reading speed is
    required, provided that any option reaches it.
    """
    notes = []
    if wish.max_memory_bytes is not None:
        notes.append(f"no more than {wish.max_memory_bytes / GB:g} GB of each device are used")
    generates = not wish.training and wish.architecture.decoder_layers and wish.new_tokens
    unsaid = wish.min_tokens_per_second is None and wish.max_seconds_per_token is None
    asked = replace(wish, max_seconds_per_token=READING_SECONDS) if generates and unsaid else wish
    options = options_on(asked, hardware, among)
    if widen and not options.any_gpu:
        asked = replace(asked, counts=counts(True, None, None))
        options = options_on(asked, hardware, among)
        notes.append("no single GPU holds it; 2, 4 and 8 were tried too")
    elif widen and any(option.machine.accelerator.kind != "cpu" for option in options.ordered):
        notes.append("no number of GPUs was named; one is taken. More may cost less a token: --max-gpus tries them")
    if asked.max_seconds_per_token is not wish.max_seconds_per_token:
        if options.best is None:
            options = options_on(replace(asked, max_seconds_per_token=None), hardware, among)
        else:
            notes.append(f"no speed was asked for; at least {1 / READING_SECONDS:g} tokens/s a sequence is taken")
    return options, notes


def options_on(wish: InstanceRequest, hardware: HardwareCatalog, among: Among) -> InstanceOptions:
    """Return one option per group of similar instances, each with the fewest devices that fit and reach the speed."""
    groups: dict[tuple[object, ...], list[tuple[Machine, Price | None]]] = {}
    for name, machine in hardware.instances().items():
        if among.has(machine):
            price = instance_price(name, wish.market, hardware, wish.region)
            own = machine.model_copy(update={"usd_per_hour": price and price.usd_per_hour})
            for count in wish.counts:
                groups.setdefault(_alike(own, count), []).append((own, price))
    best: dict[tuple[object, ...], InstanceOption] = {}
    for key, members in groups.items():
        count, group = int(str(key[0])), key[1:]
        if group in best and best[group].fits and best[group].too_slow is None:
            continue  # fewer devices suffice
        option = _option(wish, members, count)
        if group not in best or _is_nearer(option, best[group]):
            best[group] = option
    return InstanceOptions(tuple(sorted(best.values(), key=lambda option: option.order)))


def _is_nearer(option: InstanceOption, fewer: InstanceOption) -> bool:
    """Return whether an option is nearer to the task than one of fewer devices that does not fit or is too slow."""
    if not (option.fits and fewer.fits):
        return option.fits or (not fewer.fits and _lacking(option) < _lacking(fewer))
    return option.too_slow is None or _speed(option) > _speed(fewer)


def _alike(machine: Machine, count: int) -> tuple[object, ...]:
    """Return the properties that determine the prediction, except host memory."""
    alone = count <= machine.accelerators
    device, link = machine.accelerator, machine.neighbour
    inside = link.name if link and min(count, machine.accelerators) > 1 else None
    between = None if alone or machine.between is None else machine.between.model_dump_json()
    memory = machine.accelerators if not alone else None
    return count, machine.name.split("/")[0], device.name, inside, between, memory


def _option(wish: InstanceRequest, members: list[tuple[Machine, Price | None]], count: int) -> InstanceOption:
    """Return the cheapest member that fits; if none fits, the one with the most host memory."""
    tried: list[InstanceOption] = []
    members = sorted(members, key=lambda m: (m[1] is None, m[1].usd_per_hour if m[1] else 0.0))
    for machine, price in members:
        option = _evaluated(wish, machine, price, count)
        if option.fits:
            return option
        tried.append(option)
    return max(tried, key=lambda option: option.machine.host_memory_bytes or 0)


def _evaluated(wish: InstanceRequest, machine: Machine, price: Price | None, count: int) -> InstanceOption:
    device = machine.accelerator
    setup: TrainingSetup | InferenceSetup
    if wish.training:
        setup = TrainingSetup(
            wish.architecture, machine, sequence_length=wish.sequence_length, precision=training_precision(device)
        )
        batch = wish.batch_size * count
    else:
        setup = inference_base(wish.architecture, machine, wish.sequence_length, wish.new_tokens)
        batch = wish.batch_size
    try:
        limits = with_memory_limit(LAUNCHABLE if wish.training else None, wish.max_memory_bytes)
        candidate = ranked(setup, count, batch, limits)[0]
    except ValueError as error:  # no link for this many devices, or no layout
        return InstanceOption(machine, count, None, price, why_not=str(error))
    return InstanceOption(machine, count, candidate, price, _too_slow(wish, candidate))


def inference_base(architecture: Architecture, machine: Machine, prompt_tokens: int, new_tokens: int) -> InferenceSetup:
    """Return the base setup: weights and products in the device's best 16-bit format."""
    form = inference_format(machine.accelerator)
    return InferenceSetup(
        architecture, machine, prompt_tokens=prompt_tokens, new_tokens=new_tokens, weights=form, compute=form
    )


def _too_slow(wish: InstanceRequest, candidate: EvaluatedSetup) -> str | None:
    tokens, least, most = candidate.tokens_per_second, wish.min_tokens_per_second, wish.max_seconds_per_token
    if tokens is not None and least is not None and tokens < least:
        return f"is predicted to reach {rate(tokens)} tokens/s of {least:,.0f}"
    time = candidate.time
    if isinstance(time, GenerationTime) and most is not None and time.token_seconds > most:
        return f"is predicted to take {time.token_seconds * 1e3:.1f} ms a token of {most * 1e3:.1f}"
    return None


def _family(option: InstanceOption) -> str:
    device = option.machine.accelerator
    return device.name.rpartition("-")[0] if device.kind == "cpu" else device.name


def _speed(option: InstanceOption) -> float:
    """Return tokens per second, 0 where none is predicted."""
    return (option.candidate and option.candidate.tokens_per_second) or 0.0


def _lacking(option: InstanceOption) -> float:
    """Return the needed memory as a share of the device's: above 1 some is missing."""
    if option.candidate is None:
        return float("inf")
    return option.candidate.memory.total / option.machine.accelerator.memory_bytes


def counts(distributed: bool, gpu_count: int | None, max_gpus: int | None) -> tuple[int, ...]:
    """Return the device counts to try: those named, else one, else 1, 2, 4 ... and the maximum (8 by default)."""
    if gpu_count is not None:
        return (gpu_count,)
    return tuple(_powers(max_gpus or 8)) if distributed or max_gpus else (1,)


def _powers(most: int) -> Iterator[int]:
    """Yield the powers of two below a number, and the number: a model may fit on 3 GPUs and not on 2."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most
