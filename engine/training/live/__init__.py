"""Live metrics of a training measurement: TensorBoard, MLflow, Weights & Biases, Prometheus.

with open_live(measurement, context) as live:
    if live.wants:
        live.tell(step=10, seconds=0.21, tokens=4096, loss=2.1)
"""

from engine.training.live.sender import LiveStreams, open_live

__all__ = ["LiveStreams", "open_live"]
