"""What a record says of how a rank computes: attention's kernel, CUDA graphs, compilation, reduced precision.

environment |= computing_environment(cell, device, config, transport)
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from configs.families.config import ModelConfig
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from engine.kernels.gpu import has_gpu_attention, why_no_gpu_kernels
from engine.kernels.linear import why_no_cpu_kernels
from engine.parallel.transports import graph_obstacle
from engine.rank.attention_rule import AttentionCall, Gpu, explain_attention

Pass = Literal["prefill", "decode", "training"]

_LENGTH = 128  # of the prompt that torch is asked about; its choice depends on head size, dtype, mask and device
_BACKENDS: dict[int, str] = {value.value: name.lower() for name, value in SDPBackend.__members__.items()}


def computing_environment(
    cell: Cell, device: torch.device, config: ModelConfig | None, transport: str = "none"
) -> dict[str, Any]:
    """Return settings that decide which kernels run, of rankwise's engine; on a GPU with the reason of each.

    attention_prefill, attention_decode, attention_training: the kernel that torch chooses for this model (of a decode
    step that its graph lets cover the cache's whole capacity, with a mask); None where the engine has its own kernel or
    no such pass. gpu_kernels: whether it has its own there. cpu_kernels_why_not: only where compiled ones cannot be
    had, as without a C compiler. transport: of the tensor-parallel group.
    """
    kind = descriptor_of(cell.workload)
    ours = cell.engine == "rankwise"
    on_gpu = device.type == "cuda"
    why_no_graph = _why_no_graph(cell, device, transport)
    passes: dict[Pass, bool] = {
        "prefill": not kind.trains,
        "decode": not kind.trains and on_gpu and not _has_own_attention(cell, device, config),
        "training": kind.trains,
    }
    said: dict[str, Any] = {
        "attention_allowed": _allowed() if on_gpu else None,
        "cuda_graphs": why_no_graph is None,
        "cuda_graphs_why": why_no_graph or "a decode step has static shapes, those of the cache's capacity",
        "compiled": cell.engine_mode == "compiled" or bool(getattr(cell.workload, "compiled", False)),
        "tf32": torch.backends.cuda.matmul.allow_tf32 if on_gpu else None,
    }
    if device.type == "cpu" and ours and config is not None and not kind.trains and (why := why_no_cpu_kernels()):
        said["cpu_kernels_why_not"] = why
    if on_gpu and ours:
        why_no_kernels = why_no_gpu_kernels(device)
        said |= {"gpu_kernels": why_no_kernels is None, "gpu_kernels_why_not": why_no_kernels}
    for name, exists in passes.items():
        asked = ours and exists and config is not None
        chosen = attention_kernel(config, cell.dtype, device, name) if asked and config is not None else None
        said[f"attention_{name}"] = chosen
        if on_gpu and chosen is not None and config is not None:
            call = AttentionCall(cell.dtype, config.head_dim, masked=name == "decode", trains=name == "training")
            said[f"attention_{name}_why"] = explain_attention(chosen, _order(), call, _gpu(device))
    return said


def attention_kernel(config: ModelConfig, dtype: str, device: torch.device, of: Pass = "prefill") -> str:
    """Return the kernel that torch's `scaled_dot_product_attention` takes for a prompt, for one token with a mask, or
    for a sequence of training: "flash_attention", "efficient_attention", "cudnn_attention", "math", ...
    """
    queries, keys, mask = attention_operands(config, dtype, device, of)
    grouped = queries.shape[1] != keys.shape[1]
    chosen = torch._fused_sdp_choice(queries, keys, keys, mask, is_causal=mask is None, enable_gqa=grouped)
    return _BACKENDS[int(chosen)]


def attention_operands(
    config: ModelConfig, dtype: str, device: torch.device, of: Pass
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries [1, heads, length, head_dim], keys (values are alike) and mask as `engine.models.llama.attend`
    passes them on: for one token, a group's heads are positions of one query.
    """
    groups = config.heads // config.kv_heads

    def tensor(count: int, length: int) -> Tensor:
        shape, trains = (1, count, length, config.head_dim), of == "training"
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=trains)

    keys = tensor(config.kv_heads, _LENGTH)
    if of != "decode":
        return tensor(config.heads, _LENGTH), keys, None
    mask = torch.ones(1, 1, 1, _LENGTH, dtype=torch.bool, device=device)
    return tensor(config.kv_heads, groups), keys, mask


def _has_own_attention(cell: Cell, device: torch.device, config: ModelConfig | None) -> bool:
    """Whether decode steps attend by a kernel of ours; those of an encoder-decoder do not."""
    if config is None or config.kind != "decoder":
        return False
    return has_gpu_attention(device, getattr(torch, cell.dtype), config.head_dim, config.heads // config.kv_heads)


def _why_no_graph(cell: Cell, device: torch.device, transport: str) -> str | None:
    if cell.engine != "rankwise":
        return f"{cell.engine} decides for itself"
    if not descriptor_of(cell.workload).decodes:
        return "no decode steps"
    return graph_obstacle(device.type, transport)


def _gpu(device: torch.device) -> Gpu:
    return Gpu(torch.cuda.get_device_capability(device), torch.version.hip is not None)


def _order() -> list[str]:
    return [_BACKENDS[number] for number in torch._C._get_sdp_priority_order()]


def _allowed() -> list[str]:
    cuda = torch.backends.cuda
    known = {
        "flash_attention": cuda.flash_sdp_enabled,
        "efficient_attention": cuda.mem_efficient_sdp_enabled,
        "cudnn_attention": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return [name for name, enabled in known.items() if enabled()]  # type: ignore[no-untyped-call]
