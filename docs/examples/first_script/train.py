"""Train a small classifier with DistributedDataParallel: an ordinary script, without a line for Rankwise."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    random = torch.Generator().manual_seed(args.seed + dist.get_rank())
    for step in range(args.steps):
        began = time.perf_counter()
        inputs = torch.randn(args.batch_size, 256, generator=random)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            took = 1000 * (time.perf_counter() - began)
            print(f"step {step} loss {loss.item():.4f} time {took:.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
