"""Tensor-parallel linear layers for custom models.

    config = create_tensor_parallel_config(world_size=2, rank=rank, device=device, hidden_size=1024,
                                           intermediate_size=2816, num_attention_heads=16)
    up = ColumnParallelLinear(config.up)            # split by weight rows: each rank has some outputs
    down = RowParallelLinear(config.down)           # split by weight columns: outputs are summed
    y = down(torch.relu(up(x)))                     # one all-reduce for the two

A pair of column and row layers needs one all-reduce, so `up` leaves its output split (`gather_output=False`). The
result equals that of unsplit layers, up to the order of summation. They are for inference: no gradients. The engine's
own models (`engine.inference`) use the same split, with fused products, from a checkpoint.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.common.base import plain_integer
from configs.families.config import ModelConfig
from engine.api.current_group import check_device, world_communicator
from engine.kernels.linear import PackedLinear, pack_linear
from engine.models.sharding import Share, check_degrees
from engine.parallel.communicator import Communicator

_SPREAD = 0.02

INIT_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda weight: weight.normal_(0.0, _SPREAD),
    "xavier": lambda weight: torch.nn.init.xavier_uniform_(weight),
    "kaiming": lambda weight: torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5)),
    "zeros": lambda weight: weight.zero_(),
}


@dataclass
class TensorParallelConfig:
    """One linear layer [output_size, input_size] split over `world_size` ranks, of which this is `rank`.

    gather_output: a column-parallel layer returns all outputs on every rank. init_method: one of INIT_METHODS, used
    until weights are loaded. Raises ValueError for invalid values.
    """

    world_size: int
    rank: int
    device: torch.device
    input_size: int
    output_size: int
    bias: bool = True
    gather_output: bool = True
    init_method: str = "normal"

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        for name in ("world_size", "rank", "input_size", "output_size"):
            setattr(self, name, plain_integer(getattr(self, name)))
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank: {self.rank} is not one of world_size={self.world_size}; ranks are numbered from 0")
        if min(self.input_size, self.output_size) < 1:
            raise ValueError(f"input_size, output_size: {self.input_size}, {self.output_size}; use 1 or more")
        if self.init_method not in INIT_METHODS:
            raise ValueError(f"init_method: {self.init_method!r} is not one of {', '.join(INIT_METHODS)}")

    def part(self, size: int, what: str) -> range:
        """Return this rank's part of `size` rows or columns. Raises ValueError naming the degrees that divide it."""
        if size % self.world_size:
            working = ", ".join(str(degree) for degree in range(1, min(size, 64) + 1) if size % degree == 0)
            raise ValueError(f"world_size: {self.world_size} does not divide {what} {size}; use one of: {working}")
        each = size // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)


@dataclass
class TransformerParallelConfig(TensorParallelConfig):
    """The split of a whole transformer layer. `heads`, `kv_heads` and `feed_forward` are this rank's.

    As a single layer it is the feed-forward's up projection, [intermediate_size, hidden_size].
    """

    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    heads: range = range(0)
    kv_heads: range = range(0)
    feed_forward: range = range(0)

    def linear(self, input_size: int, output_size: int, gather_output: bool = False) -> TensorParallelConfig:
        """Return the configuration of a linear layer of this model, on these ranks."""
        return TensorParallelConfig(
            self.world_size, self.rank, self.device, input_size, output_size, self.bias, gather_output, self.init_method
        )

    @property
    def query(self) -> TensorParallelConfig:
        """Query projection: column-parallel, by heads."""
        return self.linear(self.hidden_size, self.num_attention_heads * self.head_dim)

    @property
    def up(self) -> TensorParallelConfig:
        """Feed-forward up projection (and the gate): column-parallel."""
        return self.linear(self.hidden_size, self.intermediate_size)

    @property
    def down(self) -> TensorParallelConfig:
        """Feed-forward down projection: row-parallel."""
        return self.linear(self.intermediate_size, self.hidden_size)


def create_tensor_parallel_config(
    world_size: int,
    rank: int,
    device: torch.device,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_key_value_heads: int | None = None,
    *,
    bias: bool = False,
    init_method: str = "normal",
) -> TransformerParallelConfig:
    """Return the split of a transformer of this shape. num_key_value_heads: None for as many as attention heads.

    Raises ValueError, naming valid degrees, if `world_size` cannot divide the heads.
    """
    world_size, rank, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads = map(
        plain_integer, (world_size, rank, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads)
    )
    if num_attention_heads < 1 or hidden_size % num_attention_heads:
        raise ValueError(
            f"num_attention_heads: {num_attention_heads} does not divide hidden_size {hidden_size}; "
            "every head has the same number of features"
        )
    model = ModelConfig.parse(
        {
            "model_type": "llama",
            "vocab_size": max(world_size, 1),
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
        }
    )
    config = TransformerParallelConfig(
        world_size,
        rank,
        device,
        input_size=hidden_size,
        output_size=intermediate_size,
        bias=bias,
        gather_output=False,
        init_method=init_method,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
    )
    check_degrees(model, world_size, pp=1)
    share = Share.of(model, world_size, rank)
    config.heads, config.kv_heads, config.feed_forward = share.heads, share.kv_heads, share.feed_forward
    return config


class _ParallelLinear:
    """Base class: this rank's part of the weight, packed for its device."""

    def __init__(
        self,
        config: TensorParallelConfig,
        communicator: Communicator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._choose_part(config)
        self.config = replace(config)  # later changes do not affect this layer
        self.communicator = world_communicator() if communicator is None else communicator
        if (self.communicator.size, self.communicator.index) != (config.world_size, config.rank):
            raise ValueError(
                f"world_size, rank: {config.world_size}, {config.rank} are not those of this process's group "
                f"({self.communicator.size}, {self.communicator.index}); initialize a MultiGPUOrchestrator, or start "
                "this under torchrun and call torch.distributed.init_process_group"
            )
        check_device(self.communicator, config.device, "device")
        self.dtype = dtype
        # All ranks draw the whole weight and keep their part, so that equal seeds give the same layer with any split.
        weight = INIT_METHODS[config.init_method](torch.empty(config.output_size, config.input_size))
        self.load(weight, torch.zeros(config.output_size) if config.bias else None)

    def load(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Load this rank's part of a whole layer: weight [output_size, input_size], bias [output_size] or None.

        The layer has copies: the caller may change or free both. Raises ValueError for other shapes.
        """
        config = self.config
        shape = (config.output_size, config.input_size)
        if tuple(weight.shape) != shape or (bias is not None and tuple(bias.shape) != shape[:1]):
            raise ValueError(f"weight: shapes are {shape} and {shape[:1]} for the bias, not {tuple(weight.shape)}")
        if (bias is None) == config.bias:
            raise ValueError(f"bias: the layer was made with bias={config.bias}")
        part, part_of_bias = self._cut(weight, bias)
        # Copies: a layer that is not packed keeps what it is given, and a part would keep the whole weight.
        on_device = None if part_of_bias is None else part_of_bias.detach().to(config.device, self.dtype, copy=True)
        own = part.detach().to(config.device, self.dtype, copy=True, memory_format=torch.contiguous_format)
        self._packed: PackedLinear = pack_linear(own, on_device)

    def _choose_part(self, config: TensorParallelConfig) -> None:
        raise NotImplementedError

    def _cut(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b with W's rows, and so y's features, split: x [..., input_size] is whole on every rank.

    Returns [..., output_size] on every rank with `gather_output`, else this rank's [..., output_size / world_size].
    `output_size` must be a multiple of `world_size`.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., input_size]."""
        with torch.no_grad():
            own = self._packed(x)
            if not self.config.gather_output or self.config.world_size == 1:
                return own
            return self.communicator.all_gather(own).movedim(0, -2).flatten(-2)

    def _choose_part(self, config: TensorParallelConfig) -> None:
        self.outputs = config.part(config.output_size, "output_size")

    def _cut(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows = slice(self.outputs.start, self.outputs.stop)
        return weight[rows], None if bias is None else bias[rows]


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + b with W's columns, and so x's features, split; the ranks' results are summed.

    x is this rank's part [..., input_size / world_size], as returned by a column-parallel layer, or whole. Returns
    [..., output_size] on every rank. `input_size` must be a multiple of `world_size`.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., input_size / world_size] or [..., input_size]."""
        with torch.no_grad():
            if x.shape[-1] == self.config.input_size:
                x = x[..., self.inputs.start : self.inputs.stop]
            return self.communicator.all_reduce(self._packed(x.contiguous()))

    def _choose_part(self, config: TensorParallelConfig) -> None:
        self.inputs = config.part(config.input_size, "input_size")

    def _cut(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # The first rank adds the bias, so that it is added once.
        return weight[:, self.inputs.start : self.inputs.stop], bias if self.config.rank == 0 else None
