"""The live agent in a Lightning ``Trainer``: two lines around ``fit``, two ranks, no launcher.

You learn: Lightning starts its ranks by itself, by the same script, so ``live.attach`` before ``fit`` attaches the
agent on each. Rank 1 sleeps 20 ms in each step. At the end rank 0 prints the agent's page, which names rank 1.

    python examples/live_lightning.py --out runs/live/lightning
"""

import argparse
import time

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceenv import live


class Module(pl.LightningModule):
    """A layer whose second rank is slow."""

    def __init__(self, late_ms: float) -> None:
        super().__init__()
        self.layer, self.late_s = torch.nn.Linear(64, 64), late_ms / 1e3

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(self.late_s)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps to train (%(default)s)")
    parser.add_argument("--late-ms", type=float, default=20.0, help="what rank 1 sleeps in each step (%(default)s)")
    parser.add_argument("--out", default="runs/live/lightning", help="folder of the agent (%(default)s)")
    options = parser.parse_args(argv)

    pl.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(16 * options.steps, 64)), batch_size=8)  # 8 for each of two ranks
    trainer = pl.Trainer(
        max_steps=options.steps,
        devices=2,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    agent = live.attach(out=options.out)
    trainer.fit(Module(options.late_ms), data)
    agent.detach()  # rank 0 prints the page


if __name__ == "__main__":
    main()
