"""Formatting of numbers and tables: three significant digits, units, escaped Markdown.

Everything here is a pure function of its arguments; nothing knows of records or plans.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from configs.common.files.reading import MIB
from configs.common.printable import padded, printable, terminal_columns
from configs.common.printable import plural as plural
from reports.numbers.statistics import ROUNDING, Bounds, Estimate, Ratio

UNKNOWN = "–"

_CODE = re.compile(r"`([^`<>&\\\s](?:[^`<>&\\]{0,118}[^`<>&\\\s])?)`")
"""A command or a field, as our own sentences write them; marks of HTML are left to `escaped`."""
_MATH = re.compile(r"\$(?!\d)")
_PARENTHESES = re.compile(r"\([^()]*\)")
"""What begins or ends a formula in Markdown as GitHub and editors show it; `$5` is dollars."""

_PYTHON_WORDS = {"None": "none", "True": "true", "False": "false"}
_MOST_DIGITS = 1e15
"""From here on a number is written with its exponent: further digits are no number's that a float holds."""


@dataclass(frozen=True)
class Table:
    """A table of text. The first `text_columns` columns are aligned left, the others (numbers) right.

    left_out: how many rows more there are, which its last row says to be `elsewhere` (`reports.tables.first_rows`).
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    left_out: int = 0
    elsewhere: str = ""

    def markdown(self) -> str:
        """The table in GitHub's Markdown, without a newline at its end."""
        rules = ["---" if index < self.text_columns else "---:" for index in range(len(self.columns))]
        return "\n".join("| " + " | ".join(line) + " |" for line in (self.columns, rules, *self.rows))

    def without_empty_columns(self) -> "Table":
        """Without the columns in which no row knows anything."""
        kept = [
            index
            for index in range(len(self.columns))
            if index < self.text_columns or any(row[index] != UNKNOWN for row in self.rows)
        ]
        return replace(
            self,
            columns=tuple(self.columns[index] for index in kept),
            rows=tuple(tuple(row[index] for index in kept) for row in self.rows),
        )


def number(value: float | None, digits: int = 3) -> str:
    """A value rounded to so many significant digits: `6,120`, `20.8`, `0.00210`, `2.1e-6`, `1.00e15`."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    rounded = float(f"{value:.{digits - 1}e}")
    size = abs(rounded)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= _MOST_DIGITS:
        mantissa, _, exponent = f"{rounded:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{rounded:,.{decimals}f}"


def count(value: float | None) -> str:
    """A whole number, every digit of it."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def percent(share: float | None, digits: int = 3) -> str:
    """A share as per cent: 0.937 gives `93.7 %`."""
    return UNKNOWN if share is None else f"{number(share * 100, digits)} %"


def repeats(count: int) -> str:
    """`1 repeat`, `3 repeats`."""
    return plural(count, "repeat")


def estimate_cell(value: Estimate | None, scale: float = 1.0) -> str:
    """Median and interval for a table: `412 (405 to 418)`; a range is in brackets: `412 [405 to 418]`."""
    if value is None:
        return UNKNOWN
    median = number(value.median * scale)
    if value.count == 1:
        return median
    low, high = (number(bound * scale) for bound in value.bounds)
    return f"{median} [{low} to {high}]" if value.interval is None else f"{median} ({low} to {high})"


def estimate_text(value: Estimate, unit: str, scale: float = 1.0) -> str:
    """For a sentence: `412 tokens/s (405 to 418, 95 % interval, 10 repeats)`, or `range of 3 repeats`."""
    text = f"{number(value.median * scale)} {unit}"
    if value.count == 1:
        return f"{text} (1 repeat)"
    low, high = (number(bound * scale) for bound in value.bounds)
    kind = f"range of {repeats(value.count)}" if value.interval is None else f"95 % interval, {repeats(value.count)}"
    return f"{text} ({low} to {high}, {kind})"


def ratio_digits(bounds: Bounds | None) -> int:
    """Three, or as many as show that bounds leave out 1: `better` beside `1.00 (1.00 to 1.00)` is no news."""
    if bounds is None or (bounds[0] <= 1 + ROUNDING and bounds[1] >= 1 - ROUNDING):
        return 3
    nearest = min(bounds, key=lambda bound: abs(bound - 1))
    return next((digits for digits in range(3, 6) if number(nearest, digits) != number(1.0, digits)), 6)


def ratio_cell(value: Ratio | None) -> str:
    """`1.87 (1.80 to 1.93)`; brackets where the pairs are too few for an interval."""
    if value is None:
        return UNKNOWN
    digits = ratio_digits(value.bounds)
    text = number(value.value, digits)
    return text if value.count == 1 else f"{text} {_bounds(value, lambda bound: number(bound, digits))}"


def change(share: float) -> str:
    """A change as per cent, a rise with its sign: `+6.30 %`, `-7.00 %`, `0 %`."""
    text = percent(share)
    return f"+{text}" if share > 0 else text


def change_cell(value: Ratio | None) -> str:
    """The same as a change: `-6.30 % (-7.00 % to +1.10 %)`."""
    if value is None:
        return UNKNOWN
    text = change(value.value - 1)
    return text if value.count == 1 else f"{text} {_bounds(value, lambda bound: change(bound - 1))}"


def _bounds(value: Ratio, written: Callable[[float], str]) -> str:
    low, high = (written(bound) for bound in value.bounds)
    return f"[{low} to {high}]" if value.interval is None else f"({low} to {high})"


def ratio_text(value: Ratio, noun: str) -> str:
    """For a sentence: `1.87 times (1.80 to 1.93, 95 % interval, 10 pairs)`."""
    digits = ratio_digits(value.bounds)
    text = f"{number(value.value, digits)} times"
    if value.count == 1:
        return f"{text} (1 {noun})"
    low, high = (number(bound, digits) for bound in value.bounds)
    counted = plural(value.count, noun)
    kind = f"range of {counted}" if value.interval is None else f"95 % interval, {counted}"
    if value.interval is not None and value.comparisons > 1:
        kind += f", corrected for {value.comparisons} comparisons"
    return f"{text} ({low} to {high}, {kind})"


def pairs_text(value: Ratio) -> str:
    """For an opening: `1.67 times (1.43 to 1.79, 95 % interval, 8 pairs)`, whatever it is corrected for."""
    return ratio_text(value, "pair").replace(f", corrected for {value.comparisons} comparisons", "")


def mebibytes(value: float | None) -> str:
    """Bytes as MiB, without the unit."""
    return number(None if value is None else value / MIB)


def escaped(text: str) -> str:
    """Text from elsewhere (a message, a prompt) on one line, with no meaning to Markdown or HTML."""
    return _without_marks(printable(" ".join(text.split())))


def prose(text: str) -> str:
    """A plain sentence as inline Markdown: what stands between backticks is code, the rest as `escaped`."""
    parts = _CODE.split(printable(" ".join(text.split())))
    return "".join(f"`{part}`" if place % 2 else _without_marks(part) for place, part in enumerate(parts))


def _without_marks(flat: str) -> str:
    for character, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        flat = flat.replace(character, instead)
    for character in "\\`*_[]|~":
        flat = flat.replace(character, "\\" + character)
    return _MATH.sub(r"\\$", flat)


def code(text: str) -> str:
    """A path or a name in a table, as code."""
    return f"`{printable(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def fact_text(*values: str) -> str:
    """Values of a fact of the environment for a table, as a person writes them: `none`, `true`, `gloo, nccl`."""
    return escaped(", ".join(_PYTHON_WORDS.get(value, value) for value in sorted(values))) or UNKNOWN


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading: `strong: llama (x)` has `strong-llama-x`."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def joined(items: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`; of names that have commas themselves `a, 1; b, 2; and c, 3`."""
    texts = list(items)
    if len(texts) < 2:
        return "".join(texts)
    if len(texts) > 2 and any(", " in _without_parentheses(text) for text in texts):
        return f"{'; '.join(texts[:-1])}; and {texts[-1]}"
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _without_parentheses(text: str) -> str:
    shorter = _PARENTHESES.sub("", text)
    return shorter if shorter == text else _without_parentheses(shorter)


def first_of(items: Sequence[str], most: int) -> str:
    """The first items, joined, and how many more there are: `a, b and 5 more`."""
    return joined([*items[:most], f"{len(items) - most:,} more"] if len(items) > most else items)


_TIES_NAMED = 3


def not_apart(names: Sequence[str]) -> str:
    """What a superlative owes those that are as good: `, not told apart from a and b`; nothing where there are none."""
    return f", not told apart from {first_of(names, _TIES_NAMED)}" if names else ""


def aligned(table: Table) -> str:
    """A table in columns of spaces, without the marks that Markdown needs."""
    lines = [tuple(_plain(text) for text in line) for line in (table.columns, *table.rows)]
    widths = [max(terminal_columns(line[index]) for line in lines) for index in range(len(table.columns))]
    rows = []
    for line in lines:
        cells = [
            padded(text, width, right=index >= table.text_columns)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        rows.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(rows)


def _plain(text: str) -> str:
    """Without emphasis, code marks and escapes: what `escaped` and `code` put in, taken out."""
    bare = re.sub(r"(?<!\\)(\*\*|`)", "", text)
    bare = re.sub(r"\\(.)", r"\1", bare)
    return bare.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
