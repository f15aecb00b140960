"""Native CPU kernels: linear layers with packed or quantised weights, small fused operators, attention.

Import the modules, `engine.kernels.linear` for one; their C is compiled at first use (`engine.kernels.build`).
"""
