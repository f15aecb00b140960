"""Why torch takes an attention kernel on a GPU, and what each kernel makes of the engine's shapes, without a GPU."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.models.llama import attend
from engine.rank.attention_rule import AttentionCall, Gpu, explain_attention, obstacle
from engine.rank.computing import Pass, attention_operands

TURING, AMPERE, A10G, HOPPER, BLACKWELL_RTX = (Gpu(each) for each in ((7, 5), (8, 0), (8, 6), (9, 0), (12, 0)))
AMD = Gpu((9, 4), rocm=True)
ORDER = ["cudnn_attention", "flash_attention", "efficient_attention", "math"]


@pytest.mark.parametrize(
    ("kernel", "call", "gpu", "reason"),
    [
        ("flash_attention", AttentionCall("bfloat16", 128), HOPPER, None),
        ("flash_attention", AttentionCall("bfloat16", 128, masked=True), HOPPER, "takes no mask"),
        ("flash_attention", AttentionCall("float32", 64), HOPPER, "16-bit numbers, not float32"),
        ("flash_attention", AttentionCall("float16", 64), TURING, "needs capability 8.0, not 7.5"),
        ("flash_attention", AttentionCall("bfloat16", 320), AMPERE, "at most 256, not 320"),
        ("flash_attention", AttentionCall("bfloat16", 208, trains=True), A10G, "no backward pass of heads of 208"),
        ("flash_attention", AttentionCall("bfloat16", 208, trains=True), BLACKWELL_RTX, "capability 12.0"),
        ("flash_attention", AttentionCall("bfloat16", 208), A10G, None),
        ("flash_attention", AttentionCall("bfloat16", 256, trains=True), A10G, None),
        ("flash_attention", AttentionCall("bfloat16", 208, trains=True), AMPERE, None),
        ("flash_attention", AttentionCall("float16", 128), AMD, None),
        ("efficient_attention", AttentionCall("float32", 64), TURING, None),
        ("efficient_attention", AttentionCall("bfloat16", 64), TURING, "no bfloat16 on capability 7.5"),
        ("efficient_attention", AttentionCall("float64", 64), HOPPER, "no float64"),
        ("efficient_attention", AttentionCall("bfloat16", 20), HOPPER, "a multiple of 8 in bfloat16, not 20"),
        ("efficient_attention", AttentionCall("float32", 20, masked=True), HOPPER, None),
        ("efficient_attention", AttentionCall("float32", 18), HOPPER, "a multiple of 4 in float32, not 18"),
        ("efficient_attention", AttentionCall("float32", 18), TURING, None),
        ("cudnn_attention", AttentionCall("bfloat16", 128, masked=True), HOPPER, None),
        ("cudnn_attention", AttentionCall("bfloat16", 100), HOPPER, "a multiple of 8, at most 256, not 100"),
        ("cudnn_attention", AttentionCall("float32", 128), HOPPER, "16-bit numbers, not float32"),
        ("cudnn_attention", AttentionCall("float16", 128), AMD, "not in builds for ROCm"),
        ("math", AttentionCall("float64", 7, masked=True), TURING, None),
    ],
)
def test_what_a_kernel_cannot_do_is_named(kernel: str, call: AttentionCall, gpu: Gpu, reason: str | None) -> None:
    found = obstacle(kernel, call, gpu)
    assert found is None if reason is None else found is not None and reason in found and kernel in found


def test_the_reason_of_a_choice_is_what_is_wrong_with_those_before_it() -> None:
    prompt = AttentionCall("float32", 128)
    first = explain_attention("cudnn_attention", ORDER, AttentionCall("bfloat16", 128), HOPPER)
    assert first == "cudnn_attention is the first in torch's order"
    assert explain_attention("math", ORDER, prompt, HOPPER) == (
        "cudnn_attention takes 16-bit numbers, not float32; flash_attention takes 16-bit numbers, not float32; "
        "efficient_attention: refused by this version of torch"
    )


@pytest.mark.parametrize("of", ("prefill", "decode", "training"))
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("architecture", ("llama-1m", "gpt2-1m"))
def test_every_kernel_that_the_rule_allows_keeps_shape_and_dtype(architecture: str, dtype: str, of: Pass) -> None:
    """torch's own shape functions of the CUDA kernels, on tensors without data."""
    config = ModelConfig.parse(ARCHITECTURES[architecture])
    with FakeTensorMode(), torch.no_grad():  # the backward pass would ask a torch without CUDA for a stream, and abort
        queries, keys, mask = attention_operands(config, dtype, torch.device("cuda"), of)
        length = 1 if of == "decode" else queries.shape[2]
        heads = torch.empty(1, config.heads, length, config.head_dim, dtype=queries.dtype, device="cuda")
        mixed = attend(heads, keys, keys, mask)
        assert (mixed.shape, mixed.dtype, mixed.device.type) == (heads.shape, heads.dtype, "cuda")
        call = AttentionCall(dtype, config.head_dim, masked=of == "decode", trains=of == "training")
        allowed = [kernel for kernel in ORDER[:3] if obstacle(kernel, call, HOPPER) is None]
        assert "efficient_attention" in allowed
        assert ("flash_attention" in allowed) == (dtype != "float32" and of != "decode")
        for kernel in allowed:
            out = run(kernel, queries, keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1), mask)
            assert (out.shape, out.dtype, out.device.type) == (queries.shape, queries.dtype, "cuda")


def run(kernel: str, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The operator of a kernel, as torch calls it: a mask is a bias in the queries' dtype."""
    operators = torch.ops.aten
    shape = (*queries.shape[:3], keys.shape[2])
    bias = None if mask is None else torch.empty(shape, dtype=queries.dtype, device="cuda")
    if kernel == "flash_attention":
        return operators._scaled_dot_product_flash_attention(queries, keys, keys, 0.0, True)[0]
    operator = getattr(operators, f"_scaled_dot_product_{kernel}")
    return operator(queries, keys, keys, bias, False, 0.0, mask is None)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("of", ("prefill", "decode", "training"))
def test_torch_takes_no_kernel_that_the_rule_excludes(dtype: str, of: Pass) -> None:
    config = ModelConfig.parse(ARCHITECTURES["llama-1m"])
    queries, keys, mask = attention_operands(config, dtype, torch.device("cuda"), of)
    params = torch.backends.cuda.SDPAParams(queries, keys, keys, mask, 0.0, mask is None, mask is None)
    gpu = Gpu(torch.cuda.get_device_capability(), torch.version.hip is not None)
    call = AttentionCall(dtype, config.head_dim, masked=of == "decode", trains=of == "training")
    for name in ("flash", "efficient", "cudnn"):
        if getattr(torch.backends.cuda, f"can_use_{name}_attention")(params):
            assert obstacle(f"{name}_attention", call, gpu) is None
