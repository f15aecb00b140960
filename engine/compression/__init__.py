"""Weights made smaller while they are loaded: pruned, quantised; `docs/reference/compression.md` defines each pass.

compressor = Compressor(("prune_2_4", "int8"), torch.bfloat16, device)
layer = compressor.pack(parts, bias, "quick")       # in place of pack_linear, product by product
figures = compressor.figures(dense_bytes, plain_bytes)
"""

from engine.compression.compressor import Compressor
from engine.compression.passes import Hardware, hardware_of, resolve

__all__ = ["Compressor", "Hardware", "hardware_of", "resolve"]
