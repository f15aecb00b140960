"""Run torch's reductions in another order, as tensor parallelism, blocking and other kernels do.

While the mode is on, every matrix product is split over its inner dimension into two to four partial sums, each rounded
to the dtype before they are added in a random order; attention sees its keys and the channels of its heads in a random
order, every other time with rounded scores instead of a fused kernel; means and norms are taken in a random order.
torch's functions are patched while a model runs, so it is independent of the model's architecture.

    with Reordered(seed=1, rounded_scores=False):
        model(tokens)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MOST_PARTS = 4
_SAMPLES = 6  # sampled rows and columns of a product for the error estimate
_SCORES_BYTES = 256 * 1024 * 1024  # attention is computed with explicit scores only below this


class Reordered(TorchFunctionMode):
    """Context in which torch's reductions use an order drawn from `seed`. Results differ by rounding only.

    rounded_scores: attention by separate products, with scores rounded to the dtype.
    """

    def __init__(self, seed: int, rounded_scores: bool) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(seed)
        self._rounded_scores = rounded_scores
        self._own_error = self._chain_error = 0.0
        self._changed: dict[Any, Callable[..., Any]] = {
            functional.linear: self._linear,
            torch.matmul: self._matmul,
            Tensor.matmul: self._matmul,
            Tensor.__matmul__: self._matmul,
            torch.bmm: self._matmul,
            Tensor.bmm: self._matmul,
            torch.addmm: self._addmm,
            torch.mean: self._mean,
            Tensor.mean: self._mean,
            functional.layer_norm: self._layer_norm,
            functional.rms_norm: self._rms_norm,
            functional.scaled_dot_product_attention: self._attention,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch instead of `func`; inside, the mode is off."""
        return self._changed.get(func, func)(*args, **(kwargs or {}))

    def _order(self, count: int, device: torch.device) -> Tensor:
        return torch.randperm(count, generator=self._random).to(device)

    def _parts(self, count: int) -> list[slice]:
        """Split `count` into two to four parts at random places, in random order."""
        most = min(_MOST_PARTS, count)
        if most < 2:
            return [slice(0, count)]
        parts = int(torch.randint(2, most + 1, (1,), generator=self._random))
        cuts = sorted((torch.randperm(count - 1, generator=self._random)[: parts - 1] + 1).tolist())
        found = [slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
        return [found[place] for place in torch.randperm(parts, generator=self._random)]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        first, *others = self._parts(weight.shape[1])
        out = functional.linear(input[..., first], weight[:, first])
        for part in others:
            out = out + functional.linear(input[..., part], weight[:, part])
        self._sample(input, weight, out)
        return out if bias is None else out + bias

    def _sample(self, input: Tensor, weight: Tensor, out: Tensor) -> None:
        """Record errors of a few results: as computed, and summed strictly one product after the other."""
        rows = torch.randint(out[..., 0].numel(), (_SAMPLES, 1), generator=self._random).to(out.device)
        words = torch.randint(out.shape[-1], (1, _SAMPLES), generator=self._random).to(out.device)
        own = out.reshape(-1, out.shape[-1])[rows, words].double()
        left, right = input.reshape(-1, input.shape[-1])[rows[:, 0], None].float(), weight[words[0]].float()
        exact = (left.double() * right.double()).sum(-1)
        scale = (left.double() * right.double()).square().sum(-1) + torch.finfo(torch.float64).tiny
        # numpy's running sum is in float32, torch's on a CPU in float64.
        running = np.cumsum((left * right).cpu().numpy(), axis=-1)[..., -1]
        chain = torch.from_numpy(running).to(out.device, out.dtype).double()
        self._own_error += float(((own - exact).square() / scale).sum())
        self._chain_error += float(((chain - exact).square() / scale).sum())

    @property
    def chain(self) -> float:
        """Error of strictly sequential sums over that of the actual sums."""
        return (self._chain_error / self._own_error) ** 0.5 if self._own_error else 1.0

    def _matmul(self, input: Tensor, other: Tensor) -> Tensor:
        if input.ndim < 2 or other.ndim < 2 or not input.is_floating_point():
            return torch.matmul(input, other)
        first, *others = self._parts(input.shape[-1])
        out = torch.matmul(input[..., first], other[..., first, :])
        for part in others:
            out = out + torch.matmul(input[..., part], other[..., part, :])
        return out

    def _addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return beta * input + alpha * self._matmul(mat1, mat2)

    def _mean(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (args[0] if args else kwargs.get("dim")) in (-1, [-1], (-1,), input.ndim - 1):
            input = input[..., self._order(input.shape[-1], input.device)]
        return torch.mean(input, *args, **kwargs)

    def _layer_norm(
        self, input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        if len(shape) != 1:
            return functional.layer_norm(input, shape, weight, bias, eps)
        order = self._order(input.shape[-1], input.device)
        weight, bias = (None if each is None else each[order] for each in (weight, bias))
        return functional.layer_norm(input[..., order], shape, weight, bias, eps)[..., order.argsort()]

    def _rms_norm(self, input: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if len(shape) != 1:
            return functional.rms_norm(input, shape, weight, eps)
        order = self._order(input.shape[-1], input.device)
        weight = None if weight is None else weight[order]
        return functional.rms_norm(input[..., order], shape, weight, eps)[..., order.argsort()]

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        keys = self._order(key.shape[-2], key.device)
        channels = self._order(key.shape[-1], key.device)
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device).tril()
        if attn_mask is not None and attn_mask.shape[-1] == key.shape[-2]:
            attn_mask = attn_mask[..., keys]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = query[..., channels], key[..., keys, :][..., channels], value[..., keys, :]
        if self._rounded_scores and 4 * query[..., 0].numel() * len(keys) <= _SCORES_BYTES and query.ndim == 4:
            return _by_scores(query, key, value, attn_mask, scale)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa
        )


def _by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention [batch, heads, length, head_dim] with scores and weights rounded to the dtype."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(scores.float().softmax(-1).to(query.dtype), value)
