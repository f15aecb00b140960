"""Predict generation by other people's engines (vLLM, TensorRT-LLM): batches, waves, intervals, fitted constants."""
