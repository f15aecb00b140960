"""Kernels of our own for CPUs: linear layers with packed weights, small fused operators; C compiled at first use.

Import the modules: `engine.kernels.linear`, `engine.kernels.operators`, `engine.kernels.build`.
"""
