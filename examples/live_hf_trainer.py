"""The live agent in a Hugging Face ``Trainer``: two lines around ``train()``.

You learn: ``live.attach`` before the training, without a model, follows the first optimizer that steps. Rank 1's data
set sleeps 2.5 ms for each item, 20 ms a batch. At the end rank 0 prints the agent's page, which names rank 1. On a CPU
the Trainer needs ``use_cpu=True``; without it every rank would train by itself, with nothing to compare.

    torchrun --nproc-per-node 2 examples/live_hf_trainer.py --out runs/live/trainer
"""

import argparse
import tempfile
import time

import torch
import transformers

from paceenv import live


class Model(torch.nn.Module):
    """Returns a loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(x)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class Data(torch.utils.data.Dataset):
    """Items whose loading takes longer on rank 1."""

    def __init__(self, items: int, late_ms: float) -> None:
        self.items, self.late_s = items, late_ms / 1e3

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            time.sleep(self.late_s)
        return {"x": torch.randn(64), "labels": torch.zeros(64)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps to train (%(default)s)")
    parser.add_argument("--late-ms", type=float, default=2.5, help="what rank 1 sleeps for an item (%(default)s)")
    parser.add_argument("--out", default="runs/live/trainer", help="folder of the agent (%(default)s)")
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as checkpoints:
        arguments = transformers.TrainingArguments(
            output_dir=checkpoints,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            use_cpu=not torch.cuda.is_available(),
            eval_strategy="steps",
            eval_steps=max(options.steps // 3, 1),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        trainer = transformers.Trainer(
            Model(),
            arguments,
            train_dataset=Data(16 * options.steps, options.late_ms),
            eval_dataset=Data(16, 0.0),
        )
        agent = live.attach(out=options.out)
        trainer.train()
        agent.detach()  # rank 0 prints the page


if __name__ == "__main__":
    main()
