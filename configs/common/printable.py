"""Foreign text made fit to print: names, messages, host names and log lines that others wrote.

    printable("a\x1b[31m\nb")                 # "a\\x1b[31m b"
    printable(name, 60)                       # at most so many characters
    printable_lines(message, 4000)            # keeps line feeds, which our own messages use
    some_of(names)                            # "a, b, c and 97 more"
    plural(1, "cell")                         # "1 cell"
    significant(1841.3)                       # "1,840", not "1.84e+03"
    duration_text(5400)                       # "90 min"
    value_text({"dp": 2})                     # "dp=2", a value of a study file in words
    file_slug("strong: tiny (random)")        # "strong-tiny-random", for the name of a file
    csv_text("=1+1")                          # "'=1+1", which no spreadsheet computes

A terminal obeys control characters, and readers are misled by those that reverse the direction of writing. All text
that a study, a run folder, a model or a host brings along passes here before it is printed or rendered.
"""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

_Value = TypeVar("_Value")

# C0, DEL and C1; invisible marks, line separators and direction marks; isolates; byte order mark; surrogates; tags.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MAX_SLUG = 80
_SPACES = "\t\n\v\f\r"


def printable(text: str, max_characters: int | None = None) -> str:
    """Return the text on one line: white space as spaces, other control characters as visible escapes."""
    # Cut first: what is foreign may be megabytes long, and an escape takes at most ten characters.
    shown = _CONTROL.sub(_visible, text if max_characters is None else text[: max_characters + 1])
    return shown if max_characters is None else shortened(shown, max_characters)


def printable_lines(text: str, max_characters: int | None = None) -> str:
    """Return the text with its line feeds; everything else as `printable` shows it."""
    shown = text if max_characters is None else shortened(text, max_characters)
    return "\n".join(printable(line) for line in shown.split("\n"))


def shortened(text: str, max_characters: int) -> str:
    """At most so many characters, with an ellipsis where something was cut."""
    return text if len(text) <= max_characters else text[: max_characters - 1].rstrip() + "…"


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Return `a, b, c`; of more names than `most` the first ones, and how many more: `a, b and 998 more`."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:most])} and {rest:,} more"


def plural(count: int, noun: str) -> str:
    """`1 cell`, `1,200 cells`, `2 launches`."""
    return f"{count:,} {noun if count == 1 else plural_noun(noun)}"


def plural_noun(noun: str) -> str:
    """`cells`, `batches`, `queries`; of `samples`, which is one, itself."""
    if re.search(r"[^aeious]s$", noun) or noun.endswith("es"):
        return noun
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def duration_text(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.95 * size:
            return f"{seconds / size:.2g} {name}" if seconds < 10 * size else f"{seconds / size:,.0f} {name}"
    return f"{seconds:.0f} s"


def terminal_columns(text: str) -> int:
    """How many columns of a terminal a text takes: two for each sign of Chinese, Japanese or Korean and each emoji."""
    if text.isascii():
        return len(text)
    return sum(_columns_of(character) for character in text)


def padded(text: str, columns: int, right: bool = False) -> str:
    """The text with spaces after it, or before it, to so many columns of a terminal."""
    space = " " * (columns - terminal_columns(text))
    return space + text if right else text + space


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # accents of the character before, joiners
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def significant(value: float, digits: int = 3) -> str:
    """So many significant digits without an exponent of large values: `0.0427`, `12.3`, `1,840`."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.{digits}g}" if abs(rounded) < 10**digits else f"{rounded:,.0f}"


def value_text(value: object) -> str:
    """A value of a study file in words, not as Python writes it: `dp=2 tp=2`, `int8 + int4`, `true`, `none`."""
    if value is None or value in ([], ()):
        return "none"
    if value == {}:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return " ".join(f"{name}={value_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " + ".join(map(value_text, value))
    return str(value)


def file_slug(text: str) -> str:
    """Foreign text as a part of a file's name: lower-case letters, digits and dashes, at most 80 characters.

    Where something was cut, a hash of the whole text follows, so that two long texts have two names.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "figure"
    if len(slug) <= _MAX_SLUG:
        return slug
    return f"{slug[: _MAX_SLUG - 9].rstrip('-')}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"


def csv_text(value: _Value) -> _Value | str:
    """A value of a CSV file: text that spreadsheets would take for a formula has a ' before it, numbers stay.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _visible(match: re.Match[str]) -> str:
    character = match[0]
    if character in _SPACES:
        return " "
    point = ord(character)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
