"""Numbers as they are printed."""

import math

import pytest

from configs.common.printable import shortened, terminal_columns
from reports.document.inline import inline_plain
from reports.numbers.statistics import Estimate, Ratio
from reports.text import (
    Table,
    aligned,
    change,
    change_cell,
    code,
    count,
    escaped,
    estimate_cell,
    estimate_text,
    first_of,
    joined,
    number,
    percent,
    prose,
    ratio_cell,
    ratio_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (6123.4, "6,120"),
        (5_347_328, "5,350,000"),
        (999.6, "1,000"),
        (412.3, "412"),
        (20.84, "20.8"),
        (0.99951, "1.00"),
        (-1.867, "-1.87"),
        (0.0021, "0.00210"),
        (0.00021, "2.10e-4"),
        (123_456_789_012_345, "123,000,000,000,000"),
        (1e30, "1.00e30"),
        (math.nan, "not a number"),
        (math.inf, "infinite"),
    ],
)
def test_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_counts_and_spreads() -> None:
    assert (percent(0.937), percent(None), percent(0.1, 2), number(1e-4, 1)) == ("93.7 %", "–", "10 %", "1e-4")
    assert (count(5_347_328), count(None)) == ("5,347,328", "–")
    value = Estimate(0.0208, 0.0201, 0.0213, 3)
    assert estimate_cell(value, 1000) == "20.8 [20.1 to 21.3]"
    assert estimate_text(value, "ms", 1000) == "20.8 ms (20.1 to 21.3, range of 3 repeats)"
    assert estimate_cell(Estimate(2.0, 2.0, 2.0, 1)) == "2.00" and estimate_cell(None) == "–"
    assert estimate_text(Estimate(2.0, 2.0, 2.0, 1), "s") == "2.00 s (1 repeat)"


def test_text_from_elsewhere_cannot_break_a_table() -> None:
    assert escaped("a | b\n<script> *x* [y](z)") == "a \\| b &lt;script&gt; \\*x\\* \\[y\\](z)"
    assert escaped("$a$ and b$, for $5.20") == "\\$a\\$ and b\\$, for $5.20"  # no formula between two of them
    assert code("a|b`c") == "`a\\|b'c`"
    for text in ("$a$", "$5", "a|b", "\\$"):
        assert aligned(Table(("x",), ((escaped(text),),))).splitlines()[1].strip() == text
        assert inline_plain(escaped(text)) == text and inline_plain(code(text)) == text
    assert shortened("abcdef", 4) == "abc…" and shortened("abc", 4) == "abc"
    assert (joined([]), joined(["a"]), joined(["a", "b", "c"])) == ("", "a", "a, b and c")
    cells = ["1 rank, float32", "dp=2, float32", "tp=2, float32"]
    assert joined(cells) == "1 rank, float32; dp=2, float32; and tp=2, float32", "where a name ends was a guess"
    assert joined(cells[:2]) == "1 rank, float32 and dp=2, float32"
    assert joined(["a (1, 2 (3, 4))", "b (5, 6)", "c"]) == "a (1, 2 (3, 4)), b (5, 6) and c"


def test_of_many_names_the_first_are_told() -> None:
    """A sentence on a load named each of thousands of points."""
    names = [f"rate {number}" for number in range(1000)]
    assert first_of(names[:8], 8) == joined(names[:8])
    assert first_of(names, 2) == "rate 0, rate 1 and 998 more"
    assert first_of([f"dp=2, rate {number}" for number in range(9)], 2) == "dp=2, rate 0; dp=2, rate 1; and 7 more"


def test_a_table_drops_what_nobody_knows() -> None:
    table = Table(("cell", "speed", "memory"), (("a", "1", "–"), ("b", "–", "–")))
    assert table.without_empty_columns().markdown() == "| cell | speed |\n| --- | ---: |\n| a | 1 |\n| b | – |"


def test_columns_stand_in_line_behind_wide_signs() -> None:
    """A sign of Chinese takes two columns of a terminal, and an accent none."""
    lines = aligned(Table(("cell", "n"), (("\u6a21\u578b, 1 rank", "1.0"), ("cafe\u0301", "12.0")))).split("\n")
    assert {terminal_columns(line) for line in lines} == {20}
    assert [terminal_columns(text) for text in ("tiny", "\u6a21\u578b", "\U0001f680", "e\u0301", "\uff21")] == [
        4,
        4,
        2,
        1,
        2,
    ]


def test_a_ratio_that_is_told_apart_from_1_is_not_written_as_1() -> None:
    """`wins` stood beside `1.00 (1.00 to 1.00)`."""
    assert ratio_cell(Ratio(1.0017, 1.001, 1.003, 10, (1.0014, 1.0021))) == "1.002 (1.001 to 1.002)"
    assert ratio_cell(Ratio(0.99996, 0.9, 1.1, 10, (0.99994, 0.99998))) == "0.99996 (0.99994 to 0.99998)"
    assert ratio_text(Ratio(1.0017, 1.001, 1.003, 10, (1.0014, 1.0021)), "pair").startswith("1.002 times (1.001 to")
    for same in (Ratio(1.0001, 0.999, 1.001, 10, (0.9999, 1.0002)), Ratio(1.0001, 0.9999, 1.0002, 3, None)):
        assert ratio_cell(same)[:5] == "1.00 "


def test_a_range_that_leaves_out_1_shows_it() -> None:
    """`fastest with 1.00 times (1.00 to 1.00, range of 5 pairs) the throughput of` the next: by the range it is."""
    ahead = Ratio(1.0021, 1.0018, 1.0022, 5, None)
    assert ahead.is_above(1)
    assert ratio_cell(ahead) == "1.002 [1.002 to 1.002]"
    assert ratio_text(ahead, "pair") == "1.002 times (1.002 to 1.002, range of 5 pairs)"


def test_a_rise_has_its_sign() -> None:
    """`change of it 12.0 % (-1.00 % to 15.0 %)` beside the `+12.0 %` of compression."""
    assert change_cell(Ratio(1.12, 1.1, 1.2, 10, (0.99, 1.15))) == "+12.0 % (-1.00 % to +15.0 %)"
    assert change_cell(Ratio(0.9, 0.9, 0.9, 1, None)) == "-10.0 %"
    assert [change(share) for share in (0.5, 0.0, -0.5)] == ["+50.0 %", "0 %", "-50.0 %"]


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("Set `machine` to <one>.", "Set `machine` to &lt;one&gt;."),  # it was \\`machine\\`
        ("`rankwise plan` of a_b|c", "`rankwise plan` of a\\_b\\|c"),
        ("`a|b` and `c", "`a|b` and \\`c"),
        ("an odd ` mark, 5` more", "an odd \\` mark, 5\\` more"),
        ("`<b>`", "\\`&lt;b&gt;\\`"),
    ],
)
def test_backticks_of_a_sentence_are_code(text: str, markdown: str) -> None:
    assert prose(text) == markdown
    assert inline_plain(prose("`a` b_c")) == "a b_c"
