"""Jobs with the trainers of other libraries for the tests of the live agent: the same training with and without it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from live_bodies import SHORT, delaying_policy
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceenv import live

STEPS, EVALUATE_EVERY, SAVE_EVERY, ACCUMULATED = 72, 35, 40, 2
ITEMS, WIDTH, BATCH = 64, 64, 4


def data() -> TensorDataset:
    return TensorDataset(torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(1)))


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def with_and_without(train: Callable[[str], str], out: str) -> dict[str, str]:
    """Digests of the parameters, without an agent and then under one that delays."""
    plain = train("plain")
    agent = live.attach(None, delaying_policy(), "active", out=f"{out}/run", **SHORT)
    paced = train("paced")
    agent.detach()
    return {"plain": plain, "paced": paced}


def hugging_face(*, out: str) -> dict[str, Any]:
    """``transformers.Trainer`` with gradient accumulation, evaluations and checkpoints."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.layers(inputs)
            return {"loss": (outputs - labels).square().mean(), "logits": outputs}

    class Items(Dataset[dict[str, torch.Tensor]]):
        def __init__(self) -> None:
            self.inputs = data().tensors[0]

        def __len__(self) -> int:
            return ITEMS

        def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
            return {"inputs": self.inputs[item], "labels": self.inputs[item, :1]}

    def train(name: str) -> str:
        arguments = TrainingArguments(
            output_dir=f"{out}/{name}",
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            eval_strategy="steps",
            eval_steps=EVALUATE_EVERY,
            save_strategy="steps",
            save_steps=SAVE_EVERY,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=Model(), args=arguments, train_dataset=Items(), eval_dataset=Items())
        trainer.train()
        return digest(trainer.model)

    return with_and_without(train, out)


def lightning(*, out: str) -> dict[str, Any]:
    """Lightning's ``Trainer``, two optimizers stepped by hand."""
    import pytorch_lightning

    class Model(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.automatic_optimization = layers(), False

        def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
            (inputs,) = batch
            return (self.layers(inputs) - inputs[:, :1]).square().mean()

        def training_step(self, batch: Sequence[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.loss(batch)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return loss

        def validation_step(self, batch: Sequence[torch.Tensor], index: int) -> None:
            self.loss(batch)

        def configure_optimizers(self) -> Any:
            first, _, last = self.layers
            return torch.optim.AdamW(first.parameters(), lr=0.01), torch.optim.SGD(last.parameters(), lr=0.01)

    def train(name: str) -> str:
        checkpoints = pytorch_lightning.callbacks.ModelCheckpoint(f"{out}/{name}", every_n_train_steps=2 * SAVE_EVERY)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=2 * STEPS,  # steps of optimizers
            val_check_interval=EVALUATE_EVERY,
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out,
            callbacks=[checkpoints],
        )
        model = Model()
        trainer.fit(model, DataLoader(data(), batch_size=BATCH), DataLoader(data(), batch_size=BATCH))
        assert Path(out, name).exists()
        return digest(model)

    return with_and_without(train, out)
