"""Weights of a model on the ranks: loading, slots, sharding; the training model."""
