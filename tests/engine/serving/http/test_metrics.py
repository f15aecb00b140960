"""Tokens and the time between them, as prometheus_client's own counter and histogram write them; what an idle server
shows."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.answering.app import Figures
from engine.serving.http.metrics import _GAP, ServerMetrics

GAPS = st.none() | st.sampled_from([0.0, *_GAP, 6.0]) | st.floats(0, 10)


@given(st.lists(st.tuples(st.integers(1, 40), GAPS), max_size=20))
def test_tokens_are_counted_as_by_the_library(noted: list[tuple[int, float | None]]) -> None:
    metrics, registry = ServerMetrics('m"1'), CollectorRegistry()
    counter = Counter("vllm:generation_tokens", "Generated tokens", ["model_name"], registry=registry).labels('m"1')
    histogram = Histogram(
        "vllm:inter_token_latency_seconds", "Time between tokens", ["model_name"], buckets=_GAP, registry=registry
    ).labels('m"1')
    for count, gap in noted:
        metrics.tokens(count, gap)
        counter.inc(count)
        for each in [*([] if gap is None else [gap]), *[0.0] * (count - 1)]:
            histogram.observe(each)
    wanted = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert len(wanted) == 2 * 2 + 1 + len(_GAP) + 3
    assert wanted == [line for line in metrics.write().decode().splitlines() if line in wanted]


def test_every_figure_is_zero_before_the_first_request() -> None:
    """One that appears later is missing for whoever looks now, and its first increase for Prometheus' `rate`."""
    page = ServerMetrics("m", replicas=2).write().decode()
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    samples = [one for one in samples if not one.name.endswith("_created")]
    names = {one.name.removesuffix("_count") for one in samples}
    guide = (Path(__file__).parents[4] / "docs" / "how-to" / "serving" / "serve.md").read_text()
    documented = set(re.findall(r"`((?:vllm|rankwise):\w+)`", guide))
    assert documented - names == {"rankwise:requests_refused_total"}  # which refusals there will be is not known
    assert {one.labels["engine"] for one in samples if "engine" in one.labels} == {"0", "1"}
    assert not any(one.value for one in samples)
    assert 'vllm:request_success_total{model_name="m"} 0.0' in Figures("m").write(waiting=0).decode()
