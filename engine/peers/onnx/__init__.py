"""Engines that run transformers' models as ONNX graphs: ONNX Runtime and TensorRT."""
