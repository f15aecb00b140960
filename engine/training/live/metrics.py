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
    "memory_bytes": "resident memory of the node's first rank",
    "device_memory_bytes": "memory of the accelerator of the node's first rank that tensors take",
    "device_power_watts": "power of the accelerators of all ranks of the node",
    "network_sent_bytes_per_second": "bytes that the node sent in a second, over all interfaces but the loopback",
    "network_received_bytes_per_second": "bytes that the node received in a second, the same way",
    "validation_loss": "mean loss of the last evaluation",
}
"""The first node tells all of them, others what is of the node (OF_NODE)."""
OF_NODE = (
    "step",
    "memory_bytes",
    "device_memory_bytes",
    "device_power_watts",
    "network_sent_bytes_per_second",
    "network_received_bytes_per_second",
)
METRIC_PREFIX = "rankwise_training_"
