"""The engine on a CUDA device; run where there is one, as by `make gpu-check`."""

import pytest
import torch

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.inference.graphs import static_decode
from engine.inference.model import Shard
from engine.inference.weights import shard_of
from engine.models.weights import synthetic_tensor
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def shard(dtype: torch.dtype) -> tuple[Shard, Shard]:
    """The same tiny model on the CPU and on the GPU."""
    config = ModelConfig.parse(ARCHITECTURES["llama-1m"] | {"initializer_range": 0.3})
    tensors = {
        name: synthetic_tensor(config, name, shape, 3).to(dtype) for name, shape in config.tensor_shapes().items()
    }
    one, group = Grid(1, 1, 1, 0), Communicator((0,), 0)
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    return shard_of(config, one, group, tensors), shard_of(config, one, group, on_gpu)


@torch.inference_mode()
def test_a_gpu_computes_what_a_cpu_does() -> None:
    on_cpu, on_gpu = shard(torch.float32)
    tokens = torch.randint(0, on_cpu.config.vocabulary, (2, 12))
    expected = on_cpu.head(on_cpu.forward(tokens, on_cpu.new_cache(2, 12)))
    got = on_gpu.head(on_gpu.forward(tokens.cuda(), on_gpu.new_cache(2, 12))).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_replayed_step_is_the_eager_one_bit_by_bit(dtype: torch.dtype) -> None:
    _, on_gpu = shard(dtype)
    tokens = torch.randint(0, on_gpu.config.vocabulary, (2, 12)).cuda()
    cache = on_gpu.new_cache(2, 12)
    on_gpu.forward(tokens[:, :6], cache)
    for place in range(6, 12):
        given = tokens[:, place : place + 1]
        replayed = static_decode(on_gpu, cache, given, None).clone()
        at = torch.tensor([cache.length], device="cuda")
        assert torch.equal(replayed, on_gpu.compute(given, cache.static_step(2, at, None), last_only=True))
        cache.length += 1
