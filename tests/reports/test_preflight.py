"""Slow nodes are told from their peers; rounds of pairs; the report's section."""

import time
from itertools import combinations
from pathlib import Path
from statistics import median

import pytest

from configs.plans.paths import RunPaths
from configs.plans.preflight import NodeFigures, PairFigures, Preflight, TargetPreflight, rounds_of_pairs
from reports.preflight import judge_nodes, preflight_sections, preflight_summary, sentences


def node(name: str, gemm: float = 100e9, read: float = 10e9) -> NodeFigures:
    return NodeFigures(node=name, gemm_flops_per_second=gemm, read_bytes_per_second=read)


def pairs(rates: dict[str, float]) -> list[PairFigures]:
    """`{"ab": 1e9}`: nodes of one letter."""
    return [PairFigures(nodes=(a, b), latency_seconds=1e-4, bytes_per_second=rate) for (a, b), rate in rates.items()]


def slow(nodes: list[NodeFigures], links: dict[str, float]) -> dict[str, str | None]:
    judged, _ = judge_nodes(nodes, pairs(links))
    return {found.node: found.reason for found in judged if found.verdict == "slow"}


def test_nodes_alike_are_good() -> None:
    links = {"ab": 1e9, "ac": 0.9e9, "bc": 1.1e9}
    judged, joined = judge_nodes([node("a", 95e9), node("b"), node("c", 105e9)], pairs(links))
    assert [found.verdict for found in judged] == ["good"] * 3
    assert [found.bytes_per_second for found in judged] == [1e9, 1.1e9, 1.1e9]
    assert not any(pair.slow for pair in joined)


@pytest.mark.parametrize(
    ("odd", "word"),
    [(node("b", gemm=70e9), "products of matrices at 70"), (node("b", read=7e9), "reads of memory at 70")],
)
def test_a_node_below_its_peers_is_slow(odd: NodeFigures, word: str) -> None:
    found = slow([node("a"), odd, node("c")], {})
    assert list(found) == ["b"] and word in str(found["b"])


def test_a_node_whose_every_link_is_slow_is_slow_and_its_partners_are_not() -> None:
    found = slow([node("a"), node("b"), node("c")], {"ab": 1e7, "ac": 1e9, "bc": 1e7})
    assert list(found) == ["b"] and "best link" in str(found["b"])


def test_a_slow_link_between_sound_nodes_is_told_without_blaming_a_node() -> None:
    nodes = [node(name) for name in "abcd"]
    links = {a + b: 1e9 for a, b in combinations("abcd", 2)} | {"bc": 1e7}
    judged, joined = judge_nodes(nodes, pairs(links))
    assert all(found.verdict == "good" for found in judged)
    assert [pair.nodes for pair in joined if pair.slow] == [("b", "c")]


def test_of_two_nodes_only_a_gross_difference_counts() -> None:
    assert slow([node("a"), node("b", gemm=60e9)], {"ab": 1e6}) == {}
    assert list(slow([node("a"), node("b", gemm=40e9)], {"ab": 1e9})) == ["b"]


def test_one_node_has_nobody_to_be_held_against() -> None:
    judged, _ = judge_nodes([node("a", gemm=1.0)], [])
    assert judged[0].verdict == "good" and judged[0].bytes_per_second is None


@pytest.mark.parametrize("count", range(1, 9))
def test_up_to_eight_nodes_every_pair_meets_once(count: int) -> None:
    rounds = rounds_of_pairs(count)
    met = [pair for together in rounds for pair in together]
    assert sorted(met) == list(combinations(range(count), 2))
    for together in rounds:
        busy = [place for pair in together for place in pair]
        assert len(busy) == len(set(busy)), "a node has one partner at a time"


@pytest.mark.parametrize("count", [9, 16, 33])
def test_of_more_nodes_each_meets_several_others_but_none_twice(count: int) -> None:
    met = [pair for together in rounds_of_pairs(count) for pair in together]
    assert len(met) == len(set(met)) and all(first < second for first, second in met)
    partners = [sum(place in pair for pair in met) for place in range(count)]
    assert min(partners) >= 6 and max(partners) == 7


def test_of_a_thousand_nodes_the_verdicts_take_no_time_and_the_report_says_what_is_covered(tmp_path: Path) -> None:
    """Each of 3,500 links was held against a median of all others, and all were rows of the report."""
    names = [f"n{place:03}" for place in range(1000)]
    met = [pair for together in rounds_of_pairs(1000) for pair in together]
    links = [
        PairFigures(
            nodes=(names[a], names[b]), latency_seconds=1e-4, bytes_per_second=1e9 + place if place % 100 else 1e7
        )
        for place, (a, b) in enumerate(met)
    ]
    began = time.process_time()
    nodes, judged = judge_nodes([node(name, 100e9 + place) for place, name in enumerate(names)], links)
    assert time.process_time() - began < 2.0
    assert [each.node for each in nodes if each.verdict == "slow"] == ["n000"], "all of its links are"
    assert sum(pair.slow for pair in judged) == 35 - 7
    found = TargetPreflight(
        target="cluster", settings="1", at="2026-01-01T00:00:00+00:00", ranks_per_node=1, nodes=nodes, pairs=judged
    )
    assert preflight_summary(found).startswith("1,000 nodes tested (3,500 of 499,500 links), at least 100 GFLOP/s")
    assert sentences(found)[20:] == ["9 more slow or broken nodes and slow links are in preflight.json"]
    run = RunPaths(tmp_path)
    run.preflight.write_text(Preflight(targets=(found,)).model_dump_json())
    (section,) = preflight_sections(run)
    assert "1,000 nodes, tested (3,500 of 499,500 links) at 2026" in section.title
    assert section.pairs is not None and [len(section.nodes.rows), len(section.pairs.rows)] == [201, 201]
    assert section.pairs.rows[-1][0] == "… and 3,300 more: all of them are in preflight.json"
    assert section.pairs.rows[0][2] == "10.0 (slow)"


@pytest.mark.parametrize("count", range(2, 7))
def test_a_node_is_held_against_the_median_of_the_others(count: int) -> None:
    values = [float(10 ** (place % 3)) + place for place in range(count)]
    judged, _ = judge_nodes([node(str(place), gemm=value) for place, value in enumerate(values)], [])
    for place, (found, value) in enumerate(zip(judged, values, strict=True)):
        share = value / median([*values[:place], *values[place + 1 :]])
        assert (found.verdict == "slow") == (share < (0.8 if count > 2 else 0.5))


def test_the_section_names_bad_nodes_and_shows_all_figures(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert preflight_sections(run) == []
    nodes, links = judge_nodes([node("a"), node("b", read=1e9), node("c")], pairs({"ab": 1e9, "ac": 2e9, "bc": 1e9}))
    broken = NodeFigures(node="d", verdict="broken", reason="it did not call")
    found = TargetPreflight(
        target="cluster", settings="1", at="2026-01-01T00:00:00+00:00", ranks_per_node=1, nodes=(*nodes, broken),
        pairs=links,
    )  # fmt: skip
    assert found.excluded == ("b", "d")
    run.preflight.write_text(Preflight(targets=(found,)).model_dump_json())
    (section,) = preflight_sections(run)
    said = sentences(found)
    assert said[0].startswith("node b is slow: reads of memory at 10") and said[1].startswith("node d is broken")
    assert section.sentences[0].startswith("Node b is slow")
    assert [row[0] for row in section.nodes.rows] == ["b", "d", "a", "c"], "what is not good comes first"
    assert section.nodes.rows[0][1] == "slow" and section.nodes.rows[2][2:] == ("100", "10.0", "2,000")
    assert section.pairs is not None and section.pairs.rows[0] == ("a and b", "100", "1,000")
