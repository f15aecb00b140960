"""What a training visit tells while it goes on: TensorBoard, MLflow, Weights & Biases, Prometheus.

with open_live(visit, context) as live:
    if live.wants:
        live.tell(step=10, seconds=0.21, tokens=4096, loss=2.1)
"""

from engine.training.live.telling import Live, open_live

__all__ = ["Live", "open_live"]
