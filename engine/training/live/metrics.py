"""Names of live metrics, shared by TensorBoard, MLflow and Weights & Biases.

In Prometheus they are `rankwise_training_<name>`. The shipped dashboard (docs/dashboards/training.json) shows each.
"""

METRICS = {
    "step": "optimizer steps done",
    "steps_per_second": "optimizer steps in a second, since the last time that was told",
    "tokens_per_second": "tokens over all ranks in a second, since the last time that was told",
    "loss": "mean loss of the first rank's share of the step",
    "gradient_norm": "norm of the step's gradients before clipping",
    "learning_rate": "learning rate of the step",
    "communication_share": "share of the steps' time in which the first rank waited for others",
    "memory_bytes": "resident memory of the first rank",
    "device_memory_bytes": "memory of the first rank's accelerator that tensors take",
    "validation_loss": "mean loss of the last evaluation",
}
METRIC_PREFIX = "rankwise_training_"
