"""Train a small classifier in a PyTorch loop with Accelerate.

Written from https://huggingface.co/docs/accelerate/basic_tutorials/migration: Accelerator(), prepare(), backward().
Lines for Rankwise: 2, marked.

    accelerate launch --num_processes 2 accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rankwise_probe import step  # Rankwise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    set_seed(args.seed)
    features = torch.randn(8192, 128)
    dataset = TensorDataset(features, features[:, :10].argmax(dim=1))
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    done = 0
    while done < args.steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step(tokens=len(inputs) * args.accumulation, loss=loss)  # Rankwise
                done += 1
            if done == args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
