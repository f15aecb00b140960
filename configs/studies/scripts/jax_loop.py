"""Train a small model with JAX, the batch sharded over processes.

Written from https://docs.jax.dev/en/latest/multi_process.html (jax.distributed.initialize,
make_array_from_process_local_data) and https://docs.jax.dev/en/latest/sharded-computation.html (jit over a mesh). Lines
for Rankwise: 2, marked.
"""

import argparse
import os

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rankwise_probe import step  # Rankwise


def layers(seed: int, width: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return weights and biases of three layers."""
    sizes = [64, width, width, 5]
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        (jax.random.normal(key, (fan_in, fan_out)) / np.sqrt(fan_in), jnp.zeros(fan_out))
        for key, fan_in, fan_out in zip(keys, sizes, sizes[1:], strict=False)
    ]


def loss_of(params: list[tuple[jax.Array, jax.Array]], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    hidden = inputs
    for weights, biases in params[:-1]:
        hidden = jax.nn.relu(hidden @ weights + biases)
    weights, biases = params[-1]
    return jnp.mean((hidden @ weights + biases - targets) ** 2)


@jax.jit
def update(params, inputs, targets, lr):
    """Return the weights after a step of gradient descent, and the loss."""
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs, targets)
    return jax.tree.map(lambda weight, gradient: weight - lr * gradient, params, gradients), loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The launcher itself listens on MASTER_PORT.
    coordinator = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"
    jax.distributed.initialize(coordinator_address=coordinator, num_processes=ranks, process_id=rank)
    mesh = Mesh(jax.devices(), ("data",))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(layers(args.seed, args.width), replicated)
    random = np.random.default_rng([args.seed, rank])
    for _ in range(args.steps):
        rows = random.standard_normal((args.batch_size, 64), dtype=np.float32)
        batch = jax.make_array_from_process_local_data(sharded, rows)
        targets = jax.make_array_from_process_local_data(sharded, rows[:, :5] * 2 + 1)
        params, loss = update(params, batch, targets, args.lr)
        step(tokens=args.batch_size, loss=float(loss))  # Rankwise
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
