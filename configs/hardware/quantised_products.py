"""Which quantised products a device has kernels for; the engine refuses the others, and the planner promises nothing.

    why_not_multiplied("int4", "float16", "cuda", (8, 0))       # the reason as a sentence, None: there is a kernel

On a CPU every scheme runs. On a GPU the kernels are those of torch that torchao calls too: `_int_mm` for both kinds of
int8, `_weight_int4pack_mm` for int4, `_scaled_mm` for float8. What torchao 0.18 adds for int8 and float8 with unrounded
inputs casts the whole weight at each call unless it is compiled, so nothing of it is used here.
"""

from configs.common.execution import Dtype

LEAST_CAPABILITY = {"int8": (7, 5), "int8_dynamic": (7, 5), "int4": (8, 0), "float8": (8, 9)}
"""NVIDIA compute capability from which the tensor cores multiply a scheme's numbers: 8-bit integers since Turing,
bfloat16 (of which torch's int4 kernel makes its products) since Ampere, 8-bit floats since Ada.
"""
_BFLOAT16_ONLY = ("int4", "float8")  # the dtype of inputs and results in torch's kernels


def why_not_multiplied(scheme: str, dtype: Dtype, device: str, capability: tuple[int, int] | None) -> str | None:
    """Return why weights of `scheme` are refused on a device.

    device: "cpu", "cuda" for an NVIDIA GPU, or another kind. capability: of an NVIDIA GPU; None for other devices.
    """
    if device == "cpu":
        return None
    least = LEAST_CAPABILITY[scheme]
    if device != "cuda" or capability is None:
        return f"{scheme} has kernels for CPUs and NVIDIA GPUs only; use `compression: none` on this device"
    if capability < least:
        return (
            f"{scheme} needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or more, and this one has "
            f"{capability[0]}.{capability[1]}; use `compression: none`"
        )
    if scheme in _BFLOAT16_ONLY and dtype != "bfloat16":
        return f"torch's {scheme} kernel for GPUs multiplies bfloat16, not {dtype}; use `dtype: bfloat16`"
    return None
