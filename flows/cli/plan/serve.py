"""`rankwise plan --serve`: how to serve a model with an engine within a TTFT and a TPOT, as a Pareto front.

    rankwise plan --serve --model llama-3-8b --accelerator aws/p5.48xlarge --engine vllm --ttft 0.5 --tpot 0.05
    rankwise plan --serve --model llama-3-8b --rate 20 --ttft 0.5 --tpot 0.05          on what: `machines`

The front has tokens/s of a user against tokens/s of a device. Exit codes: 0 planned, 3 nothing fits or is fast enough.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from configs.hardware.hardware import Machine
from configs.hardware.prices import Market
from engine.planner.choice.descriptions import rate, short
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.service import (
    DEFAULT_BATCHES,
    ServingLayout,
    ServingRequest,
    best_measurement,
    pareto_front,
    services,
)
from flows.cli.plan.request import NOTHING_FITS, PLANNED, PlanRequest
from flows.cli.tables import print_table

if TYPE_CHECKING:
    from configs.hardware.catalog import HardwareCatalog

_DEFAULT_PROMPT, _DEFAULT_DEVICE, _DEFAULT_ENGINE = 1024, "h100-80gb", "vllm"
_HEADER = (
    "layout", "prefill", "replicas", "devices", "batch", "TTFT s", "TPOT ms", "tokens/s/user", "tokens/s/device",
    "USD/M",
)  # fmt: skip


def plan_service(request: PlanRequest) -> int:
    """Search, print the front, name the rows that support it and the measurement that would narrow it most."""
    from engine.planner.engines.saved import shipped

    wish, assumed = _wish(request)
    calibrated = shipped()
    found = services(wish, calibrated)
    front = pareto_front(found)
    if not front:
        everything = services(replace(wish, ttft_seconds=None, tpot_seconds=None), calibrated)
        print(what_is_in_the_way(wish, everything), file=sys.stderr)
        return NOTHING_FITS
    best = max(front, key=lambda service: service.tokens_per_second_per_device)
    support = calibrated.supports([best.point])[0]
    if best.point.batch == max(wish.batches) and request.serve:
        assumed.append(f"at most {best.point.batch} sequences at once a replica, the most of any measured row")
    assumed.append(weights_note(wish, [wish.machine]))
    if any(one.point.tp * one.point.pp > wish.machine.joined_ranks for one in front):
        assumed.append(
            f"replicas of more than {wish.machine.joined_ranks} devices span machines, and what their stages send each "
            "other takes no time"
        )
    measurement, left = best_measurement(wish, calibrated, best)
    if request.as_json:
        answer = {
            "engine": wish.engine, "model": wish.architecture.name, "machine": wish.machine.name,
            "devices": wish.devices, "best": _as_dict(best), "pareto_front": [_as_dict(service) for service in front],
            "support": support, "measure_next": named_point(measurement), "spread_left": left, "assumptions": assumed,
        }  # fmt: skip
        print(json.dumps(answer, indent=1))
        return PLANNED
    told = [f"Predicted from {support}", best_measurement_title(measurement, best.spread, left)]
    _print_front(wish, front, best, told, assumed)
    return PLANNED


def _print_front(
    wish: ServingRequest,
    front: Sequence[ServingLayout],
    best: ServingLayout,
    support: Sequence[str],
    assumed: Sequence[str],
) -> None:
    """Print the best service, what it rests on and what was assumed, then a row for each of the front."""
    print(
        f"{wish.architecture.name} with {wish.engine} on {wish.devices} x {wish.machine.accelerator.name}: "
        f"{layout_title(best)}, batch {best.point.batch}: {short(best.tokens_per_second)} output tokens/s, "
        f"{short(best.tokens_per_second_per_device)} per device, {latency_title(best)}"
    )
    idle = best.devices - best.used_devices
    if idle:
        print(f"Idle: {idle} of {best.devices} devices, which the figures per device and the price include")
    if (limits := limits_title(wish)) is not None:
        print(limits)
    for line in support:
        print(line)
    print(
        "TTFT: of a prompt that need not wait for others. Only whole batches were measured, so its error is not known; "
        "under load, measure it"
    )
    for line in assumed:
        print(f"Assumed: {line}")
    print()
    print_table(_HEADER, [_row(service) for service in front], words=2)


def _wish(request: PlanRequest) -> tuple[ServingRequest, list[str]]:
    """Raises ValueError naming an option that is missing or unknown."""
    from engine.planner.choice.machines import machine_for, priced_machine

    hardware, named, market = catalog_of(request), request.accelerator or _DEFAULT_DEVICE, market_of(request)
    if "/" in named:
        machine = priced_machine(hardware.instance(named), market, hardware, hardware.region_in(named))
    else:
        machine = machine_for(hardware.accelerator(named), request.gpus or 8, hardware, market)
    if machine.accelerator.kind == "cpu":
        raise ValueError(f"--accelerator {named}: engines on CPUs are not predicted. Use a GPU")
    assumed = [] if request.accelerator else [f"--accelerator {_DEFAULT_DEVICE}"]
    wish = wish_on(request, machine)
    return wish, assumed + assumed_options(request, wish)


def wish_on(request: PlanRequest, machine: Machine) -> ServingRequest:
    """Return what is to be served, on this machine or the devices asked for. Raises ValueError naming an option."""
    from engine.planner.catalog import find_model
    from engine.planner.choice.lengths import length_of
    from engine.planner.engines.constants import engine_name
    from flows.folders import cache_folder

    assert request.model is not None
    architecture = find_model(request.model, cache_folder())
    if architecture.kind != "decoder":
        raise ValueError(f"--model {request.model}: not a decoder, so it cannot be served by an inference engine")
    return ServingRequest(
        engine=engine_name(request.engine or _DEFAULT_ENGINE),
        architecture=architecture,
        machine=machine,
        prompt_tokens=length_of(architecture, request.sequence_length or _DEFAULT_PROMPT, "inference"),
        new_tokens=request.new_tokens,
        devices=request.gpus or machine.accelerators,
        ttft_seconds=request.ttft,
        tpot_seconds=request.tpot,
        batches=DEFAULT_BATCHES if request.serve else (request.batch_size,),
    )


def assumed_options(request: PlanRequest, wish: ServingRequest) -> list[str]:
    """Return what was assumed for options that are not given, and of lengths that the model has no positions for."""
    from engine.planner.choice.lengths import length_note, room_note

    options = (
        ("--engine", request.engine, _DEFAULT_ENGINE),
        ("--sequence-length", request.sequence_length, _DEFAULT_PROMPT),
    )
    architecture, prompt = wish.architecture, wish.prompt_tokens
    limits = (("TTFT", "--ttft", wish.ttft_seconds), ("TPOT", "--tpot", wish.tpot_seconds)) if request.serve else ()
    return [
        *(f"{option} {default}" for option, given, default in options if given is None),
        *(f"no limit of {name} ({option})" for name, option, limit in limits if limit is None),
        *length_note(architecture, prompt, prompt, "inference"),
        *room_note(architecture, prompt, wish.new_tokens),
        *_window_note(wish),
    ]


def _window_note(wish: ServingRequest) -> list[str]:
    """Return what the cache is taken to keep of layers with sliding windows; nothing where no window is full."""
    from engine.planner.engines.kept import keeps_windows

    windows = [window for window in wish.architecture.windows if window is not None]
    if min(windows, default=wish.prompt_tokens + wish.new_tokens) >= wish.prompt_tokens + wish.new_tokens:
        return []
    if keeps_windows(wish.engine):
        return [f"the KV cache of {wish.engine} keeps the window alone in layers with a sliding window"]
    return [
        f"the KV cache of {wish.engine} keeps the whole context in layers with a sliding window too: an upper bound, "
        "if it can be set to keep less"
    ]


def weights_note(wish: ServingRequest, machines: Sequence[Machine]) -> str:
    """Return the format of the weights on these machines: GPUs before Ampere have float16 and no bfloat16."""
    without = [machine.accelerator.lacks(wish.weights) for machine in machines]
    if all(without):
        return "weights in float16"
    return f"weights in {wish.weights}{', in float16 on GPUs that lack it' if any(without) else ''}"


def limits_title(wish: ServingRequest) -> str | None:
    """Return the limits asked for, with their units: milliseconds given as seconds rule nothing out."""
    limits = (("TTFT", wish.ttft_seconds), ("TPOT", wish.tpot_seconds))
    given = [f"{name} up to {short(limit)} s" for name, limit in limits if limit is not None]
    return f"Limits: {', '.join(given)}" if given else None


def catalog_of(request: PlanRequest) -> "HardwareCatalog":
    """Return the catalog with the user's own hardware and prices."""
    from configs.hardware.catalog import catalog
    from flows.folders import cache_folder

    return catalog(cache_folder(), request.own_catalog, request.assignments)


def market_of(request: PlanRequest) -> Market:
    """Return the market whose prices count."""
    return "spot" if request.spot else "on_demand"


def what_is_in_the_way(wish: ServingRequest, everything: list[ServingLayout]) -> str:
    """Return what is in the way, and how near the best comes."""
    if not everything:
        return (
            f"{wish.architecture.name} does not fit on {wish.devices} x {wish.machine.accelerator.name} with sequences "
            f"of {wish.prompt_tokens + wish.new_tokens} tokens. Use more devices or a larger one"
        )
    ttft = min(service.ttft_seconds for service in everything)
    tpot = min(service.tpot_seconds for service in everything)
    return (  # in the unit of the options
        f"Nothing is fast enough: the shortest predicted TTFT is {short(ttft)} s, the shortest TPOT {short(tpot)} s. "
        f"Raise {limits_given(wish)}, or use a faster device"
    )


def limits_given(wish: ServingRequest) -> str:
    """Return the options that say how fast it has to be: `--ttft or --tpot`."""
    limits = (("--ttft", wish.ttft_seconds), ("--tpot", wish.tpot_seconds))
    return " or ".join(option for option, limit in limits if limit is not None)


def layout_title(service: ServingLayout) -> str:
    """Return the layout in a few words."""
    point = service.point
    layout = _ranks(point)
    return layout if service.prefill_ranks is None else f"{layout}, prefill apart on tp={service.prefill_ranks}"


def prefill_title(service: ServingLayout) -> str:
    """Return where prompts are computed."""
    return "together" if service.prefill_ranks is None else f"{service.prefill_replicas} x tp={service.prefill_ranks}"


def _ranks(point: BatchPoint) -> str:
    return f"tp={point.tp}" + (f" x pp={point.pp}" if point.pp > 1 else "")


def latency_title(service: ServingLayout) -> str:
    """Return TTFT and TPOT, and how far predictions may be off."""
    return (
        f"TTFT {rate(service.ttft_seconds)} s, TPOT {short(1e3 * service.tpot_seconds)} ms (throughput and TPOT within "
        f"a factor of {service.spread:.2f}, 90 %)"
    )


def best_measurement_title(point: BatchPoint, factor: float, left: float) -> str:
    """Return what to measure next, and what the factor of the errors would be then."""
    then = f"the factor would be {factor**left:.2f} instead of {factor:.2f}"
    return f"Most informative measurement: {named_point(point)}; {then}"


def named_point(point: BatchPoint) -> str:
    """Return what is to be measured, in words."""
    return (
        f"{point.architecture.name} with {point.engine} on {point.machine.accelerator.name}, {_ranks(point)}, batch "
        f"{point.batch}, {point.prompt_tokens} prompt and {point.new_tokens} new tokens"
    )


def _row(service: ServingLayout) -> list[str]:
    point = service.point
    usd = "-" if service.usd_per_million_tokens is None else short(service.usd_per_million_tokens)
    return [
        _ranks(point), prefill_title(service), str(service.replicas), str(service.used_devices), str(point.batch),
        rate(service.ttft_seconds), short(1e3 * service.tpot_seconds), short(service.tokens_per_second_per_user),
        short(service.tokens_per_second_per_device), usd,
    ]  # fmt: skip


def _as_dict(service: ServingLayout) -> dict[str, Any]:
    point = service.point
    return {
        "tp": point.tp, "pp": point.pp, "batch": point.batch, "replicas": service.replicas,
        "prefill_tp": service.prefill_ranks, "prefill_replicas": service.prefill_replicas,
        "devices": service.devices, "used_devices": service.used_devices,
        "ttft_seconds": service.ttft_seconds, "tpot_seconds": service.tpot_seconds,
        "tokens_per_second_per_user": service.tokens_per_second_per_user,
        "tokens_per_second": service.tokens_per_second,
        "tokens_per_second_per_device": service.tokens_per_second_per_device,
        "interval_factor": service.spread, "usd_per_million_tokens": service.usd_per_million_tokens,
    }  # fmt: skip
