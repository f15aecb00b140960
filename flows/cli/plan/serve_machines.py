"""`rankwise plan --serve` without a device: on which machines of the catalog to serve a model, how many, at what price.

    rankwise plan --serve --model llama-3-8b --rate 20 --ttft 0.5 --tpot 0.05
    rankwise plan --serve --model llama-3-8b --rate 20 --accelerator l40s

Exit codes: 0 planned, 3 nothing fits or is fast enough.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs.common.dollars import dollars
from configs.common.printable import plural
from configs.hardware.hardware import Machine
from engine.planner.choice.descriptions import rate, short
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.machines import ServingMachines, maybe_cheaper, serving_machines
from engine.planner.engines.service import ServingRequest, best_measurement, services
from flows.cli.plan.request import NOTHING_FITS, PLANNED, PlanRequest
from flows.cli.plan.serve import (
    assumed_options,
    best_measurement_title,
    catalog_of,
    latency_title,
    layout_title,
    limits_given,
    limits_title,
    market_of,
    named_point,
    prefill_title,
    weights_note,
    wish_on,
)
from flows.cli.tables import print_table

_SHOWN = 12
_NAMED = 3
_GPUS = ("cuda", "rocm")


def plan_serving_machines(request: PlanRequest, kinds: Sequence[str]) -> int:
    """Search the catalog, print the choice, what may be cheaper and a table. kinds: of hardware; (): all GPUs."""
    from engine.planner.engines.saved import shipped

    machines = _machines(request, kinds)
    wish, calibrated = wish_on(request, machines[0]), shipped()
    found = serving_machines(wish, machines, calibrated, request.rate)
    if not found:
        print(_nothing(wish, machines, calibrated), file=sys.stderr)
        return NOTHING_FITS
    chosen = found[0]
    own = replace(wish, machine=chosen.machine, devices=chosen.machine.accelerators)
    measurement, left = best_measurement(own, calibrated, chosen.layout)
    support = calibrated.supports([chosen.layout.point])[0]
    weights = weights_note(wish, [one.machine for one in found])
    assumed = [*assumed_options(request, wish), weights, "no replica spans machines"]
    if request.as_json:
        answer = {
            "engine": wish.engine, "model": wish.architecture.name, "requests_per_second": request.rate,
            "market": market_of(request), "best": _as_dict(chosen), "machines": [_as_dict(one) for one in found],
            "support": support, "measure_next": named_point(measurement), "assumptions": assumed,
        }  # fmt: skip
        print(json.dumps(answer, indent=1))
        return PLANNED
    print(_answer(wish, chosen, request.rate))
    cheaper = maybe_cheaper(found)
    if cheaper:
        names = [_machine_title(one) for one in cheaper[:_NAMED]]
        more = f" and {len(cheaper) - _NAMED} more" if len(cheaper) > _NAMED else ""
        print(f"Perhaps cheaper, within the errors of the predictions: {', '.join(names)}{more}")
    if (limits := limits_title(wish)) is not None:
        print(limits)
    print(f"Predicted from {support}")
    print(best_measurement_title(measurement, chosen.layout.spread, left))
    print(
        "Rates are of machines that are never idle, and TTFT is of a prompt that need not wait: leave room, and measure"
        " it (`find: max_rate` in a study of load)"
    )
    for line in assumed:
        print(f"Assumed: {line}")
    print()
    _print_machines(found)
    return PLANNED


def _machines(request: PlanRequest, kinds: Sequence[str]) -> list[Machine]:
    """The machines to choose from, at their prices. Raises ValueError where there is none."""
    from engine.planner.choice.machines import priced_machine

    hardware, named, region = catalog_of(request), request.accelerator, None
    if set(kinds) == {"cpu"}:
        raise ValueError("--hardware cpu: engines on CPUs are not predicted. Use cuda or rocm")
    if named is None:
        of = [one for one in hardware.instances().values() if one.accelerator.kind in (kinds or _GPUS)]
    elif "/" in named:
        of, region = [hardware.instance(named)], hardware.region_in(named)
    else:
        device = hardware.accelerator(named).name
        of = [one for one in hardware.instances().values() if one.accelerator.name == device]
    of = [one for one in of if one.accelerator.kind != "cpu"]
    if not of:
        raise ValueError(f"--accelerator {named}: no machine of the catalog has it. Leave --rate out, or use another")
    return [priced_machine(one, market_of(request), hardware, region) for one in of]


def _answer(wish: ServingRequest, chosen: ServingMachines, rate: float | None) -> str:
    layout = chosen.layout
    usd, hourly, price = chosen.usd_per_million_tokens, chosen.usd_per_hour, "price not known"
    if usd is not None and hourly is not None:
        price = f"{dollars(hourly)} USD/h, {short(usd)} USD per million output tokens"
    number = asked = ""
    if rate is not None:
        number = f"{chosen.count}{f' (up to {chosen.most})' if chosen.most > chosen.count else ''} x "
        asked = f" for {rate:g} requests/s of {wish.prompt_tokens:,} prompt and {wish.new_tokens:,} new tokens"
    title = f"{layout_title(layout)}, batch {layout.point.batch}"
    return (
        f"{wish.architecture.name} with {wish.engine}{asked}: {number}{chosen.machine.name} ({_devices(chosen)}), "
        f"{title}: {price}, {short(layout.tokens_per_second)} output tokens/s"
        f"{'' if rate is None else ' each'}, {latency_title(layout)}"
    )


def _devices(one: ServingMachines) -> str:
    return f"{one.machine.accelerators} x {one.machine.accelerator.name}"


def _machine_title(one: ServingMachines) -> str:
    return one.machine.name if one.count == 1 else f"{one.count} x {one.machine.name}"


def _print_machines(found: Sequence[ServingMachines]) -> None:
    """The cheapest of each accelerator."""
    best: dict[str, ServingMachines] = {}
    for one in found:
        best.setdefault(one.machine.accelerator.name, one)
    rows = [_row(one) for one in list(best.values())[:_SHOWN]]
    header = (
        "machines", "devices", "layout", "prefill", "batch", "TTFT s", "TPOT ms", "tokens/s each", "within", "USD/h",
        "USD/M",
    )  # fmt: skip
    print_table(header, rows, words=4)
    more = len(found) - len(rows)
    if more:
        print(f"{more} more: other instances with these accelerators, or dearer ones (--json has all)")


def _row(one: ServingMachines) -> list[str]:
    layout, hourly, usd = one.layout, one.usd_per_hour, one.usd_per_million_tokens
    return [
        _machine_title(one), _devices(one), layout_title(replace(layout, prefill_ranks=None)), prefill_title(layout),
        str(layout.point.batch), rate(layout.ttft_seconds), short(1e3 * layout.tpot_seconds),
        short(layout.tokens_per_second), f"{layout.spread:.2f}x",
        "not known" if hourly is None else dollars(hourly), "not known" if usd is None else short(usd),
    ]  # fmt: skip


def _nothing(wish: ServingRequest, machines: Sequence[Machine], calibrated: CalibratedEngines) -> str:
    """Return what is in the way, and how near the best comes."""
    relaxed = replace(wish, ttft_seconds=None, tpot_seconds=None)
    everything = [
        each
        for machine in machines
        for each in services(replace(relaxed, machine=machine, devices=machine.accelerators), calibrated)
    ]
    if not everything:
        return (
            f"{wish.architecture.name} fits on none of {plural(len(machines), 'machine')} of the catalog with "
            f"sequences of {wish.prompt_tokens + wish.new_tokens} tokens. Name a device and a number: --accelerator, "
            "--gpus"
        )
    first = min(everything, key=lambda one: one.ttft_seconds)
    fastest = min(everything, key=lambda one: one.tpot_seconds)
    return (
        f"No machine of the catalog is fast enough: the shortest predicted TTFT is {short(first.ttft_seconds)} s "
        f"({first.point.machine.name}), the shortest TPOT {short(fastest.tpot_seconds)} s "
        f"({fastest.point.machine.name}). Raise {limits_given(wish)}"
    )


def _as_dict(one: ServingMachines) -> dict[str, Any]:
    layout, point = one.layout, one.layout.point
    return {
        "machine": one.machine.name, "machines": one.count, "machines_at_most": one.most,
        "accelerator": one.machine.accelerator.name, "accelerators": one.machine.accelerators,
        "usd_per_hour": one.usd_per_hour, "usd_per_million_tokens": one.usd_per_million_tokens,
        "least_usd_per_million_tokens": one.least_usd_per_million_tokens,
        "tp": point.tp, "pp": point.pp, "batch": point.batch, "replicas": layout.replicas,
        "prefill_tp": layout.prefill_ranks, "prefill_replicas": layout.prefill_replicas,
        "used_devices": layout.used_devices, "ttft_seconds": layout.ttft_seconds, "tpot_seconds": layout.tpot_seconds,
        "tokens_per_second_per_machine": layout.tokens_per_second, "interval_factor": layout.spread,
    }  # fmt: skip
