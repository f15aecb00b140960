"""Train a small model in a plain PyTorch loop with DistributedDataParallel.

Written from https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html ("Initialize DDP with
torch.distributed.run") and https://docs.pytorch.org/docs/stable/data.html (DistributedSampler). Lines for Rankwise: 2,
marked.

    torchrun --nproc-per-node 2 ddp_loop.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from rankwise_probe import step  # Rankwise
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ToyModel(nn.Module):
    """Three linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a batch."""
        return self.layers(inputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    inputs = torch.randn(8192, 64)
    dataset = TensorDataset(inputs, inputs[:, :5] * 2 + 1)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(ToyModel(args.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    done, epoch = 0, 0
    while done < args.steps:
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            step(tokens=len(batch), loss=loss)  # Rankwise
            done += 1
            if done == args.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
