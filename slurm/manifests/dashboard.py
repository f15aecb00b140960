"""Grafana's dashboard of a server, over the figures of /metrics."""

from typing import Any

_PANELS = (
    ("Requests in progress and waiting", "short", (
        ("running", "sum(vllm:num_requests_running)"), ("waiting", "sum(vllm:num_requests_waiting)"))),
    ("Requests a second", "reqps", (("finished", "sum(rate(vllm:request_success_total[1m]))"),
                                    ("refused", "sum(rate(rankwise:requests_refused_total[1m]))"))),
    ("Tokens a second", "short", (("generated", "sum(rate(vllm:generation_tokens_total[1m]))"),
                                  ("prompts", "sum(rate(vllm:prompt_tokens_total[1m]))"))),
    ("Time to first token", "s", tuple(
        (f"p{share}", f"histogram_quantile(0.{share}, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))")
        for share in (50, 90, 99))),
    ("Time between tokens", "s", tuple(
        (f"p{share}", f"histogram_quantile(0.{share}, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[1m])))")
        for share in (50, 90, 99))),
    ("Time of a request", "s", tuple(
        (f"p{share}", f"histogram_quantile(0.{share}, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[1m])))")
        for share in (50, 90, 99))),
    ("Key-value cache in use", "percentunit", (("cache", "max(vllm:kv_cache_usage_perc)"),)),
    ("Restarts and preemptions", "short", (("restarts", "sum(rankwise:replica_restarts_total)"),
                                           ("preemptions", "sum(vllm:num_preemptions_total)"))),
)  # fmt: skip
_WIDTH, _HEIGHT = 12, 8


def serving_dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    panels = []
    for number, (title, unit, queries) in enumerate(_PANELS):
        targets = [
            {"refId": chr(65 + place), "legendFormat": name, "expr": expression}
            for place, (name, expression) in enumerate(queries)
        ]
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": "timeseries",
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"x": _WIDTH * (number % 2), "y": _HEIGHT * (number // 2), "w": _WIDTH, "h": _HEIGHT},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    return {
        "uid": "rankwise-serving",
        "title": "Rankwise serving",
        "schemaVersion": 39,
        "tags": ["rankwise"],
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "5s",
        "panels": panels,
    }
