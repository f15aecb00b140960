"""Encoders and encoder-decoders behind `rankwise serve`."""

from pathlib import Path

import httpx
import pytest

from configs.common.execution import Layout
from tasks.serving.process import ServerProcess
from tasks.serving.settings import DECODERS, ServerRequest, make_settings, program_of


def asked(model: str, **options: object) -> ServerRequest:
    return ServerRequest(model=model, dtype="float32", device="cpu", cores_per_rank=1, port=0, **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "path", "kernels", "body"),
    [
        ("synthetic:bert-1m@0", "/v1/embeddings", "off", {"input": [[5, 6, 7], [5, 6, 7], [9]]}),
        ("synthetic:t5-1m@0", "/v1/completions", "on", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}),
    ],
)
def test_a_model_without_a_cache_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, path: str, kernels: str, body: dict[str, object]
) -> None:
    monkeypatch.setenv("RANKWISE_KERNELS", kernels)
    settings = make_settings(asked(model, name="m"), tmp_path, tmp_path / "cache", tmp_path)
    assert program_of(settings) != DECODERS
    with ServerProcess(settings, None, program_of(settings)) as server:
        about = server.wait_until_ready()
        url, (replica,) = about["url"], about["replicas"]
        assert replica["why_no_kernels"] == (None if kernels == "on" else "linear.c: RANKWISE_KERNELS=off")
        answer = httpx.post(url + path, json={"model": "m", **body}, timeout=600, trust_env=False).json()
        if path == "/v1/embeddings":
            vectors = [one["embedding"] for one in answer["data"]]
            assert vectors[0] == vectors[1] != vectors[2] and len(vectors[0]) == 128
        else:
            assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        other = "/v1/chat/completions"
        refused = httpx.post(url + other, json={"model": "m", "messages": []}, timeout=600, trust_env=False)
        assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(("said", "length"), [(None, 512), (900, 900)])
def test_a_model_whose_positions_are_distances_takes_longer_texts(
    tmp_path: Path, said: int | None, length: int
) -> None:
    """T5 was made for 512 tokens and takes more; `--max-length 900` was refused, as if it had a table of positions."""
    wanted = asked("synthetic:t5-1m@0", max_length=said)
    assert make_settings(wanted, tmp_path, tmp_path / "cache", tmp_path).max_length == length


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layout": Layout(tp=2)}, "--tp"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"prefix_caching": False}, "--no-prefix-caching"),
        ({"compression": ("int8",)}, "--compression"),
        ({"kv_cache_gib": 1.0}, "--kv-cache-gib"),
        ({"group_timeout_seconds": 90.0}, "--group-timeout-seconds"),
        ({"max_length": 100_000}, "--max-length 100000"),
    ],
)
def test_options_of_decoders_are_refused_by_name(tmp_path: Path, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        make_settings(asked("synthetic:bert-1m@0", **options), tmp_path, tmp_path / "cache", tmp_path)
