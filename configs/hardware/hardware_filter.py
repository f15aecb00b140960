"""The filter of `--hardware-filter`: which instances of the catalog are wanted.

    wanted = parse_filter("GPU:T4+, count>=4, price<=6, region=us-east-1")
    offers = matching(wanted, catalog())          # cheapest first; unknown prices last

Terms are separated by commas; all must hold.

    GPU             any GPU                          GPU:T4          this GPU, any variant of it
    GPU:T4+         this GPU, or one of its maker's of the same generation or later
    CPU             no GPU                           provider=aws    this cloud
    memory>=23      usable GB (1e9 bytes) of a GPU   count>=4        GPUs of a node
    price<=6        USD an hour of a node            region=NAME     prices of this region

`memory`, `count` and `price` take >=, <= and =. `memory` is what a process can use, which may be less than a GPU is
sold with: 23.7 of an L4's 24, 15.6 of a T4's 16. An unknown price satisfies no condition on the price.
"""

import operator
import re
from collections.abc import Callable, Iterator
from typing import Literal

from configs.common.base import Frozen
from configs.hardware.catalog import HOME_REGIONS, HardwareCatalog
from configs.hardware.hardware import Machine

_GENERATIONS: dict[str, tuple[str, float]] = {
    "v100": ("nvidia", 7.0),
    "v100s": ("nvidia", 7.0),
    "t4": ("nvidia", 7.5),
    "rtx2080ti": ("nvidia", 7.5),
    "quadrortx6000": ("nvidia", 7.5),
    "quadrortx8000": ("nvidia", 7.5),
    "a100": ("nvidia", 8.0),
    "a800": ("nvidia", 8.0),
    "a30": ("nvidia", 8.0),
    "a10": ("nvidia", 8.6),
    "a10g": ("nvidia", 8.6),
    "a6000": ("nvidia", 8.6),
    "a40": ("nvidia", 8.6),
    "a5000": ("nvidia", 8.6),
    "rtx3090": ("nvidia", 8.6),
    "l4": ("nvidia", 8.9),
    "l40": ("nvidia", 8.9),
    "l40s": ("nvidia", 8.9),
    "rtx4090": ("nvidia", 8.9),
    "rtx6000ada": ("nvidia", 8.9),
    "h100": ("nvidia", 9.0),
    "h800": ("nvidia", 9.0),
    "h200": ("nvidia", 9.0),
    "gh200": ("nvidia", 9.0),
    "h20": ("nvidia", 9.0),
    "b200": ("nvidia", 10.0),
    "gb200": ("nvidia", 10.0),
    "b300": ("nvidia", 10.3),
    "gb300": ("nvidia", 10.3),
    "rtxpro6000": ("nvidia", 12.0),
    "gb10": ("nvidia", 12.1),
    "rtx5090": ("nvidia", 12.0),
    "mi250x": ("amd", 2.0),
    "mi250": ("amd", 2.0),
    "mi210": ("amd", 2.0),
    "mi300x": ("amd", 3.0),
    "mi300a": ("amd", 3.0),
    "mi325x": ("amd", 3.0),
    "mi355x": ("amd", 4.0),
    "mi350x": ("amd", 4.0),
}
"""Maker and generation. NVIDIA: CUDA compute capability, https://developer.nvidia.com/cuda-gpus, and
https://leimao.github.io/blog/NVIDIA-GPU-Compute-Capability for those that the page no longer lists. AMD: CDNA,
https://rocm.docs.amd.com/projects/rocprofiler-compute/en/develop/conceptual/cdna/cdna-performance-model.html.
A new GPU of the catalog needs its generation here."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "=": operator.eq}
_DEVICE = re.compile(r"(?P<kind>gpu|cpu)(:(?P<name>[\w.-]+)(?P<newer>\+)?)?", re.IGNORECASE)
_FIGURE = re.compile(r"(?P<figure>memory|count|price)\s*(?P<sign>>=|<=|=)\s*(?P<value>\d+(\.\d+)?)", re.IGNORECASE)
_PLACE = re.compile(r"(?P<what>region|provider)\s*=\s*(?P<name>[\w-]+)", re.IGNORECASE)


class Condition(Frozen):
    """A bound of one figure."""

    figure: Literal["memory", "count", "price"]
    sign: Literal[">=", "<=", "="]
    value: float


class HardwareFilter(Frozen):
    """What a filter asks for; None: anything."""

    device: Literal["gpu", "cpu"] | None = None
    gpu: str | None = None
    or_newer: bool = False
    provider: str | None = None
    region: str | None = None
    conditions: tuple[Condition, ...] = ()


class Offered(Frozen):
    """One instance that fits. region: None where its provider's home is not known."""

    name: str
    region: str | None
    machine: Machine
    vcpus: int


def parse_filter(text: str) -> HardwareFilter:
    """Return the parsed filter. Raises ValueError naming the term that is wrong."""
    found: dict[str, object] = {}
    conditions = []
    for term in (part.strip() for part in text.split(",")):
        if match := _FIGURE.fullmatch(term):
            named = {"figure": match["figure"].lower(), "sign": match["sign"], "value": float(match["value"])}
            conditions.append(Condition.model_validate(named))
        elif match := _PLACE.fullmatch(term):
            _set(found, {match["what"].lower(): match["name"]})
        elif (match := _DEVICE.fullmatch(term)) and not (match["kind"].lower() == "cpu" and match["name"]):
            _set(found, {"device": match["kind"].lower(), "gpu": match["name"], "or_newer": bool(match["newer"])})
        else:
            raise ValueError(
                f"--hardware-filter: got {term!r}, expected GPU:T4, GPU:T4+, memory>=23, count>=4, price<=6, "
                "region=us-east-1 or provider=aws, with commas between them"
            )
    wanted = HardwareFilter.model_validate({**found, "conditions": tuple(conditions)})
    if wanted.gpu is not None and wanted.gpu.lower().partition("-")[0] not in _GENERATIONS:
        raise ValueError(f"--hardware-filter: unknown GPU {wanted.gpu!r}; known: {', '.join(_GENERATIONS)}")
    if wanted.provider is not None and wanted.provider not in HOME_REGIONS:
        raise ValueError(f"--hardware-filter: unknown provider {wanted.provider!r}; known: {', '.join(HOME_REGIONS)}")
    return wanted


def _set(found: dict[str, object], terms: dict[str, object]) -> None:
    """Add what a term asks for. Raises ValueError for a second one of its kind: all must hold, and only one can."""
    for name in terms:
        if name in found:
            raise ValueError(f"--hardware-filter: {name} is asked for twice, expected once")
    found |= terms


def matching(wanted: HardwareFilter, known: HardwareCatalog) -> list[Offered]:
    """Return the instances that fit, cheapest first; those of unknown price last."""
    found = [offered for offered in _all_offered(wanted, known) if _fits(wanted, offered.machine)]
    return sorted(found, key=lambda offered: (offered.machine.usd_per_hour or float("inf"), offered.name))


def _all_offered(wanted: HardwareFilter, known: HardwareCatalog) -> Iterator[Offered]:
    """Every instance, and every machine with one of each GPU that can be attached to it."""
    for name in known.names("instances"):
        provider = name.partition("/")[0]
        if wanted.provider not in (None, provider):
            continue
        region = wanted.region or HOME_REGIONS.get(provider)
        row = known.instance_row(name)
        if row.retired:
            continue
        attached = [f"{name}+{gpu.strip()}" for gpu in row.attachable.split(";") if gpu.strip()]
        for full in [*([name] if row.accelerator or row.cpu else []), *attached]:
            yield Offered(name=full, region=region, machine=known.instance(full, region), vcpus=row.vcpus)


def _fits(wanted: HardwareFilter, machine: Machine) -> bool:
    gpu = machine.accelerator.kind in ("cuda", "rocm")
    if not gpu and machine.accelerator.kind != "cpu":  # no engine here runs on it
        return False
    if wanted.device is not None and gpu != (wanted.device == "gpu"):
        return False
    if wanted.gpu is not None and not _is_like(machine.accelerator.name, wanted.gpu.lower(), wanted.or_newer):
        return False
    figures = {
        "memory": machine.accelerator.memory_bytes / 1e9,
        "count": float(machine.accelerators if gpu else 0),
        "price": machine.usd_per_hour,
    }
    return all(
        (figure := figures[each.figure]) is not None and _COMPARE[each.sign](figure, each.value)
        for each in wanted.conditions
    )


def _is_like(name: str, gpu: str, or_newer: bool) -> bool:
    if name == gpu or name.startswith(f"{gpu}-"):
        return True
    found, wanted = _GENERATIONS.get(name.partition("-")[0]), _GENERATIONS[gpu.partition("-")[0]]
    return or_newer and found is not None and found[0] == wanted[0] and found[1] >= wanted[1]
