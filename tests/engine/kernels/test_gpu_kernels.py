"""Our Triton kernels against torch's operators, alone and in whole models: on a GPU, or by Triton's interpreter.

make test-gpu-kernels          # the interpreter, on a CPU
"""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.inference.graphs import static_decode, static_paged_step
from engine.inference.model import Shard
from engine.inference.paged import PagedSizes
from engine.inference.weights import shard_of
from engine.kernels import gpu, operators
from engine.models.weights import synthetic_tensor
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not _INTERPRETED, reason="needs a CUDA device"),
]
DEVICE = torch.device("cpu" if _INTERPRETED else "cuda")
# The interpreter rounds to bfloat16 towards zero (triton 3.6), and the C kernels take the others on a CPU.
DTYPES = [torch.float16] if _INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
_STEPS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings of a value of 1; float32 is reduced in another order, too."""
_FAMILIES = ["llama-1m", "mistral-1m", "qwen2-1m", "qwen3-1m", "gpt2-1m", "gpt-neox-1m", "gemma-1m", "phi3-1m"]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if _INTERPRETED:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        patched = interpreter._patch_lang_tensor

        def with_index(tensor: type, scope: object) -> None:
            patched(tensor, scope)
            # numpy 2.4 no longer takes an array of one element for a number (triton 3.6 bounds loops by such).
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
        monkeypatch.setattr(gpu, "_DEVICES", ["cpu"])
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def by_torch(monkeypatch: pytest.MonkeyPatch, compute: object, *given: object) -> object:
    """What torch's operators give."""
    with monkeypatch.context() as patched:
        patched.setattr(gpu, "_DEVICES", [])
        return compute(*given)  # type: ignore[operator]


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    step = times * _STEPS[dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=step, atol=step)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 4096])
def test_norms(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, update = random(3, 2, width, dtype=dtype), random(3, 2, width, dtype=dtype)
    for weight in (random(width, dtype=dtype), random(width, dtype=torch.float32)):
        wanted = by_torch(monkeypatch, operators.rms_norm, x, weight, 1e-5)
        assert_close(operators.rms_norm(x, weight, 1e-5), wanted, dtype)  # type: ignore[arg-type]
        both, normed = operators.add_rms_norm(x, update, weight, 1e-5)
        assert torch.equal(both, x + update)
        assert_close(normed, by_torch(monkeypatch, operators.rms_norm, both, weight, 1e-5), dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_activations(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(5, 2 * 1500, dtype=dtype)
    wanted = by_torch(monkeypatch, operators.activate, x, name, True)
    assert_close(operators.activate(x, name, True), wanted, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = random(2, 5, 12, 48, dtype=dtype)[:, :, :9]
    for rows in (1, 2):
        cos, sin = (random(rows, 5, 1, 24, dtype=dtype).repeat(1, 1, 1, 2) for _ in range(2))
        wanted = by_torch(monkeypatch, operators.rotate, heads, cos, sin)
        assert_close(operators.rotate(heads, cos, sin), wanted, dtype)  # type: ignore[arg-type]


def attended(keys: Tensor, values: Tensor, query: Tensor, seen: range, scale: float) -> Tensor:
    """Attention of one token in double precision; keys and values [kv_heads, positions, width]."""
    group = len(query) // len(keys)
    own_keys, own_values = (one[:, list(seen)].repeat_interleave(group, 0).double() for one in (keys, values))
    weights = torch.softmax(torch.einsum("hd,hnd->hn", query.double(), own_keys) * scale, dim=-1)
    return torch.einsum("hn,hnd->hd", weights, own_values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "kv_heads", "width", "block", "window"),
    [(8, 2, 64, 16, 0), (3, 3, 48, 16, 7), (14, 2, 80, 8, 0), (4, 1, 128, 4, 300), (16, 16, 256, 16, 0)],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_paged_attention(
    dtype: torch.dtype, queries: int, kv_heads: int, width: int, block: int, window: int, prompt: bool
) -> None:
    """A step of a prompt's piece between two answers, and one of answers alone, at short and long contexts."""
    from engine.kernels.attention_gpu import GpuAttention

    length = 640
    blocks = -(-length // block)
    store = random(2, 1, 3 * blocks, kv_heads, block, width, dtype=dtype)
    tables = torch.randperm(3 * blocks, device=DEVICE).to(torch.int32).view(3, blocks)
    angles = torch.rand(length, width // 2, device=DEVICE).mul(6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    attention = GpuAttention(store, queries, width**-0.5, (cos, sin), tables)
    sequences = [0, *[1] * 70, 2] if prompt else [2, 0, 1]
    places = [600, *range(100, 170), 3] if prompt else [500, 630, 2]
    merged = random(len(places), queries + 2 * kv_heads, width, dtype=dtype)
    heads, values = merged[:, : queries + kv_heads], merged[:, queries + kv_heads :]
    step = attention.step_places(*(torch.tensor(one, dtype=torch.int32) for one in (sequences, places)))
    found = attention.run(0, heads, values, window, step).view(len(places), queries, width)
    turned = operators.rotate(heads[None], cos[places][None, :, None], sin[places][None, :, None])[0]
    for token, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
        keys, kept = (store[part, 0, tables[sequence].long()].transpose(0, 1).flatten(1, 2) for part in (0, 1))
        assert_close(keys[:, place], turned[token, queries:], dtype)
        assert torch.equal(kept[:, place], values[token])
        seen = range(max(0, place - window + 1) if window else 0, place + 1)
        assert_close(found[token], attended(keys, kept, turned[token, :queries], seen, width**-0.5), dtype, 4)


def shard(name: str, dtype: torch.dtype) -> Shard:
    """A family's smallest model with weights that matter, and a window that is crossed where it has one."""
    config = ARCHITECTURES[name] | {"vocab_size": 61, "initializer_range": 0.1, "init_std": 0.1}
    parsed = ModelConfig.parse(config | ({"sliding_window": 9} if config.get("sliding_window") else {}))
    moved = {
        key: synthetic_tensor(parsed, key, shape, 5).to(DEVICE, dtype) for key, shape in parsed.tensor_shapes().items()
    }
    return shard_of(parsed, Grid(1, 1, 1, 0), Communicator((0,), 0), moved)


def token_by_token(model: Shard, tokens: Tensor) -> Tensor:
    """Hidden states [length, hidden] by torch's operators, each position a pass of its own without a graph."""
    cache = model.new_cache(1, len(tokens))
    found = []
    for token in tokens:
        found.append(model.compute(token.view(1, 1), cache.step(1, 1, None), last_only=False)[0])
        cache.length += 1
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", _FAMILIES)
def test_models(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and answers through a paged cache, in company and padded, and through a contiguous one with padding."""
    model = shard(name, dtype)
    rows = torch.randint(0, 61, (3, 22), device=DEVICE)
    wanted = [by_torch(monkeypatch, token_by_token, model, row) for row in rows]
    times = 300 if dtype is torch.float32 else 12  # of the hidden states of whole models
    cache = model.new_paged_cache(PagedSizes(blocks=20, block=4, sequences=4, max_length=24, max_tokens=64))
    blocks = torch.randperm(18).to(torch.int32).view(3, 6)
    for row in range(3):
        cache.assign(torch.full((6,), row, dtype=torch.int32), torch.arange(6, dtype=torch.int32), blocks[row])

    def check(hidden: Tensor, places: list[tuple[int, int]]) -> None:
        for found, (row, place) in zip(hidden, places, strict=True):
            assert_close(found, wanted[row][place], dtype, times)  # type: ignore[index]

    lengths = (18, 5, 11)
    prompts = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    slots, positions = (torch.tensor([one[axis] for one in prompts], dtype=torch.int32) for axis in (0, 1))
    tokens = torch.stack([rows[row, place] for row, place in prompts])[None]
    check(model.compute(tokens, cache.step(slots, positions), last_only=False)[0], prompts)
    check(static_paged_step(model, cache, tokens, slots, positions)[0], prompts)  # once more, a tile for each token
    for more in range(3):
        answers = [(row, length + more) for row, length in enumerate(lengths)]
        slots, positions = (torch.tensor([one[axis] for one in answers], dtype=torch.int32) for axis in (0, 1))
        tokens = torch.stack([rows[row, place] for row, place in answers])[None]
        check(static_paged_step(model, cache, tokens, slots, positions)[0], answers)

    padding = torch.tensor([0, 4, 9], device=DEVICE)
    shifted = torch.stack([row.roll(int(by)) for row, by in zip(rows, padding, strict=True)])
    whole = model.new_cache(3, 22)
    model.forward(shifted[:, :14], whole, padding)
    for place in range(14, 20):
        hidden = static_decode(model, whole, shifted[:, place : place + 1], padding)[:, 0]
        check(hidden, [(row, place - int(by)) for row, by in enumerate(padding)])
        whole.length += 1


def test_heads_that_do_not_fit_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import attention_gpu

    def too_large(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory, Required: 139520, Hardware limit: 101376")

    asked = (DEVICE, DTYPES[0], 256, 2)
    gpu._attends.cache_clear()
    assert gpu.has_gpu_attention(*asked)
    gpu._attends.cache_clear()
    monkeypatch.setattr(attention_gpu.GpuAttention, "run", too_large)
    assert not gpu.has_gpu_attention(*asked)
    gpu._attends.cache_clear()
