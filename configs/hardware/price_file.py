"""The user's own prices: contract and on-premises rates, in a YAML file that a study names under `prices`.

    offers = read_price_file(path, "prices.yaml")

    as_of: 2026-11-01                          # of all that have no date of their own
    prices:
      - {target: "gpu-*", usd_per_hour: 2.10, source: contract 4711}
      - {machine: "aws/g4dn.*", region: us-east-1, market: spot, usd_per_hour: 0.19}

`*` stands for anything. The first entry that fits a target counts. Raises StudyError naming every problem.
"""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, model_validator

from configs.common.base import Frozen
from configs.common.booleans import boolean_problems
from configs.common.files.reading import brief, length_problem
from configs.hardware.prices import Market, Offer, Price
from configs.spec.study import StudyError, read_mapping, suggestion

PricedProvider = Literal["azure", "aws"]
"""Clouds whose price lists can be fetched (`tasks.providers.price_lists`)."""


class PriceEntry(Frozen):
    """One price, for targets by name or for machines."""

    target: str | None = Field(None, min_length=1, description="name of targets")
    machine: str | None = Field(None, min_length=1, description="provider/instance, as in a target's `machine`")
    region: str | None = Field(None, min_length=1, description="none: wherever it stands")
    market: Market = "on_demand"
    usd_per_hour: PositiveFloat
    as_of: date | None = None
    source: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _is_for_something(self) -> "PriceEntry":
        if (self.target is None) == (self.machine is None):
            raise ValueError("expected either `target` (a name) or `machine` (provider/instance); * matches anything")
        if self.machine is not None and self.machine.count("/") != 1 and self.machine != "*":
            raise ValueError(f"machine: got {self.machine!r}, expected provider/instance. Set the region in `region`")
        return self


class PriceList(Frozen):
    """A price file."""

    as_of: date | None = None
    prices: list[PriceEntry] = Field(min_length=1)


def read_price_file(path: Path, name: str) -> tuple[Offer, ...]:
    """The file's offers, in its order. `name`: what the user calls it. Raises StudyError naming every problem."""
    data = read_mapping(path, name, "expected a mapping with a list `prices`")
    try:
        prices = PriceList.model_validate(data)
    except ValidationError as error:
        lines = [
            problem_line(dict(detail), PriceList, {"prices": PriceEntry}) for detail in error.errors(include_url=False)
        ]
        raise StudyError([f"{name}: {line}" for line in lines]) from error
    if problems := boolean_problems(data, prices):
        raise StudyError([f"{name}: {problem}" for problem in problems])
    return offers_of(prices.prices, prices.as_of, name)


def offers_of(entries: list[PriceEntry], as_of: date | None, name: str) -> tuple[Offer, ...]:
    """The entries as offers. `as_of`: the date of those that have none; `name`: what the user calls the file."""
    return tuple(_offer(entry, as_of, name) for entry in entries)


def _offer(entry: PriceEntry, as_of: date | None, name: str) -> Offer:
    dated = entry.as_of or as_of
    price = Price(
        usd_per_hour=entry.usd_per_hour,
        source=f"{entry.source} ({name})" if entry.source else name,
        as_of=None if dated is None else dated.isoformat(),
        market=entry.market,
        region=entry.region,
    )
    return Offer(target=entry.target, machine=entry.machine, price=price)


def problem_line(detail: dict[str, Any], whole: type[Frozen], entries: Mapping[str, type[Frozen]]) -> str:
    """One validation error as `prices[2].usd_per_hour: what is wrong`.

    whole: the model of the file. entries: those of its lists, by the key that holds them.
    """
    dotted = ""
    for item in detail["loc"]:
        dotted += f"[{item}]" if isinstance(item, int) else f"{'.' if dotted else ''}{item}"
    kind, given = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        model = entries[detail["loc"][0]] if len(detail["loc"]) > 1 else whole
        return f"{dotted}: unknown key{suggestion(str(detail['loc'][-1]), list(model.model_fields))}"
    if kind == "missing":
        return f"{dotted}: is missing"
    if kind == "value_error":
        return f"{dotted}: {detail.get('ctx', {}).get('error', detail['msg'])}"
    if (counted := length_problem(detail)) is not None:
        return f"{dotted}: {counted}"
    text = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{dotted}: {text}" + ("" if isinstance(given, dict | list) else f", got {brief(given)}")
