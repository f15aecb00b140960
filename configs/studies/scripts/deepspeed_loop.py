"""Train a small model with DeepSpeed's engine, whose settings come from a configuration file.

Written from https://www.deepspeed.ai/getting-started/: initialize(), engine(), backward(), step(). Lines for Rankwise:
1, marked. The step times come from the lines that DeepSpeed prints at log level info, one a step.

    deepspeed --num_gpus 2 deepspeed_loop.py --deepspeed --deepspeed_config deepspeed.json
"""

import argparse

import deepspeed
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.utils.logging.set_log_level_from_string("info")  # Rankwise
    torch.manual_seed(args.seed)
    width = args.width
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))
    inputs = torch.randn(8192, 64)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :5] * 2 + 1)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset
    )
    while engine.global_steps < args.steps:
        for batch, targets in loader:
            loss = nn.functional.mse_loss(engine(batch.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_steps == args.steps:
                break


if __name__ == "__main__":
    main()
