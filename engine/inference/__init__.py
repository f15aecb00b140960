"""Inference in which ranks share a model: tensor-parallel layers, pipeline stages, packed weights, a static cache."""
