"""Sharded inference: tensor-parallel layers, pipeline stages, packed weights, a static cache."""
