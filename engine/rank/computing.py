"""What a record says of how a rank computes: attention's kernel, CUDA graphs, compilation, reduced precision.

environment |= computing_environment(cell, device, config)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from configs.families.config import ModelConfig
from configs.spec.cell import Cell
from configs.workloads import descriptor_of

_LENGTH = 128  # of the prompt that torch is asked about; its choice depends on head size, dtype, mask and device
_BACKENDS: dict[int, str] = {value.value: name.lower() for name, value in SDPBackend.__members__.items()}


def computing_environment(cell: Cell, device: torch.device, config: ModelConfig | None) -> dict[str, Any]:
    """Return settings that decide which kernels run. attention_prefill, attention_decode: of rankwise's engine, the
    kernel that torch chooses for this model (a decode step on a GPU has a mask, because its graph covers the cache's
    whole capacity); None where the engine has its own kernel or no such pass.
    """
    kind = descriptor_of(cell.workload)
    ours = cell.engine == "rankwise" and config is not None and not kind.trains
    on_gpu = device.type == "cuda"
    return {
        "attention_prefill": attention_kernel(config, cell.dtype, device) if ours and config else None,
        "attention_decode": attention_kernel(config, cell.dtype, device, True) if ours and config and on_gpu else None,
        "attention_allowed": _allowed() if on_gpu else None,
        "cuda_graphs": ours and on_gpu and kind.decodes,
        "compiled": cell.engine_mode == "compiled" or bool(getattr(cell.workload, "compiled", False)),
        "tf32": torch.backends.cuda.matmul.allow_tf32 if on_gpu else None,
    }


def attention_kernel(config: ModelConfig, dtype: str, device: torch.device, one_token: bool = False) -> str:
    """Return the kernel that torch's `scaled_dot_product_attention` takes for a prompt, or for one token with a mask:
    "flash_attention", "efficient_attention", "cudnn_attention", "math", ...
    """
    heads, groups = config.kv_heads, config.heads // config.kv_heads

    def tensor(count: int, length: int) -> Tensor:
        return torch.empty(1, count, length, config.head_dim, dtype=getattr(torch, dtype), device=device)

    keys, values = tensor(heads, _LENGTH), tensor(heads, _LENGTH)
    if one_token:  # see engine.models.llama.attend: a group's heads as positions of one query
        mask = torch.ones(1, 1, 1, _LENGTH, dtype=torch.bool, device=device)
        chosen = torch._fused_sdp_choice(tensor(heads, groups), keys, values, mask)
    else:
        queries = tensor(config.heads, _LENGTH)
        chosen = torch._fused_sdp_choice(queries, keys, values, is_causal=True, enable_gqa=groups > 1)
    return _BACKENDS[int(chosen)]


def _allowed() -> list[str]:
    cuda = torch.backends.cuda
    known = {
        "flash_attention": cuda.flash_sdp_enabled,
        "efficient_attention": cuda.mem_efficient_sdp_enabled,
        "cudnn_attention": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return [name for name, enabled in known.items() if enabled()]  # type: ignore[no-untyped-call]
