"""Train an autoencoder with Lightning, on random images.

Written from https://lightning.ai/docs/pytorch/stable/starter/introduction.html ("Lightning in 15 minutes"), with random
images in place of a downloaded dataset. Lines for Rankwise: none. The step times and losses come from a callback that
Rankwise adds to the Trainer.

    torchrun --nproc-per-node 2 lightning_autoencoder.py --devices 2
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(lightning.LightningModule):
    """The autoencoder, its loss and its optimizer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 28 * 28))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        (images,) = batch
        images = images.view(images.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    lightning.seed_everything(args.seed)
    images = DataLoader(TensorDataset(torch.rand(4096, 1, 28, 28)), batch_size=args.batch_size, shuffle=True)
    trainer = lightning.Trainer(
        devices=args.devices,
        num_nodes=args.nodes,
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model=LitAutoEncoder(width=1024), train_dataloaders=images)


if __name__ == "__main__":
    main()
