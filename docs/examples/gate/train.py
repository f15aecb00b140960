"""Train a small network in numpy: the script whose speed the example gate watches."""

import numpy as np
from rankwise_probe import step

STEPS = 120
ROUNDS = 40


def main() -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((128, 128), dtype=np.float32) / 16
    batch = random.standard_normal((64, 128), dtype=np.float32)
    for _ in range(STEPS):
        hidden = batch
        for _ in range(ROUNDS):
            hidden = np.maximum(hidden @ weight, 0)
            weight *= 0.9999
        step(tokens=64, loss=float(np.square(hidden).mean()))


if __name__ == "__main__":
    main()
