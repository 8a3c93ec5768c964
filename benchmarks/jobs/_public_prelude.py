"""First line of a public training script under test: no GPU, no network, one slow rank, a hash of what was trained.

The script's own lines are left as they are but for its devices and sizes. What it would download is made here, by name
(``PUBLIC_NEEDS``): small random models, tokenizers, data. At exit each rank tells the hash of the parameters of every
optimizer that stepped, how long a step took and how long this rank slept in it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

RANK = int(os.environ.get("RANK", "0"))
SETTLED = 10
torch.set_num_threads(1)
random.seed(RANK)
np.random.seed(RANK)  # noqa: NPY002 - what scripts draw from
torch.manual_seed(RANK)


class _Steps:
    """Follows the optimizers; the slow rank sleeps after each step of the one that stepped first."""

    def __init__(self) -> None:
        self.stepped: dict[int, Optimizer] = {}
        self.times_s: list[float] = []
        self.slept_s: list[float] = []
        self.slow = int(os.environ.get("PUBLIC_SLOW", "-1")), float(os.environ.get("PUBLIC_SLOW_S", "0"))

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        first = next(iter(self.stepped.values()), optimizer)
        self.stepped[id(optimizer)] = optimizer
        if optimizer is not first:
            return
        start_s = time.perf_counter()
        if self.rank() == self.slow[0]:
            time.sleep(self.slow[1])
        self.times_s.append(time.perf_counter())
        self.slept_s.append(self.times_s[-1] - start_s)

    @staticmethod
    def rank() -> int:
        """Known late where the script starts its own processes."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))

    def tell(self) -> None:
        if not self.stepped:
            return  # a launcher, a worker that loads data
        hashed = hashlib.sha256()
        for optimizer in self.stepped.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    hashed.update(local.detach().float().contiguous().cpu().numpy().tobytes())
        between_s = np.diff(self.times_s)[SETTLED:]
        rank = self.known_rank
        found = {
            "rank": rank,
            "hash": hashed.hexdigest(),
            "steps": len(self.times_s),
            "iteration_s": float(np.mean(between_s)) if len(between_s) else None,
            "slept_s": statistics.fmean(self.slept_s[SETTLED:]) if between_s.size else 0.0,
        }
        (Path(os.environ["PUBLIC_TOLD"]) / f"rank{rank}.json").write_text(json.dumps(found))

    known_rank = RANK


def _follow() -> None:
    steps = _Steps()

    def after(optimizer: Optimizer, *rest: Any) -> None:
        steps.known_rank = steps.rank()  # at exit the process group is gone
        steps.after(optimizer, *rest)

    register_optimizer_step_post_hook(after)
    atexit.register(steps.tell)


def _torchvision() -> None:
    """Its wheel's operators need CUDA's libraries; declared, the rest of it works without them."""
    library = torch.library.Library(  # type: ignore[no-untyped-call]
        "torchvision", "DEF"
    )
    for name in ("nms", "qnms"):
        signature = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(signature)  # type: ignore[no-untyped-call]
    torch.torchvision_operators = library  # type: ignore[attr-defined]  # they live as long as it does


def _bert() -> None:
    """A classifier of sentences and its metric, tiny and random."""
    import transformers

    class Metric:
        def add_batch(self, **_: Any) -> None: ...
        def compute(self) -> dict[str, float]:
            return {}

    def make(*_: Any, **__: Any) -> Any:
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
            )
        )

    transformers.AutoModelForSequenceClassification.from_pretrained = make
    sys.modules["evaluate"] = evaluate = ModuleType("evaluate")
    evaluate.__spec__ = ModuleSpec("evaluate", None)
    evaluate.load = lambda *_: Metric()  # type: ignore[attr-defined]


def sentences(*_: Any) -> tuple[Any, Any]:
    """Loaders of random sentences with labels, for training and for evaluation."""
    import transformers

    tokens = torch.randint(128, (512, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.sum() % 2} for row in tokens]

    def collate(chosen: Any) -> Any:
        return transformers.BatchEncoding(torch.utils.data.default_collate(chosen))

    def loader(chosen: Any, **settings: Any) -> Any:
        return torch.utils.data.DataLoader(chosen, batch_size=4, collate_fn=collate, **settings)

    return loader(rows, shuffle=True), loader(rows[:16])


def _llama() -> None:
    """A causal language model and its tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    def make(*_: Any, **__: Any) -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
            )
        )

    def tokenizer(*_: Any, **settings: Any) -> Any:
        words = {word: place for place, word in enumerate(["<unk>", "</s>", "<s>", *"abcdefghijklmnopqrstuvwxyz"])}
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, unk_token="<unk>", eos_token="</s>", bos_token="<s>", model_max_length=48
        )

    transformers.AutoModelForCausalLM.from_pretrained = make
    transformers.AutoTokenizer.from_pretrained = tokenizer


_NEEDS: dict[str, Callable[[], None]] = {"bert": _bert, "llama": _llama}

if find_spec("torchvision"):
    _torchvision()

for _need in filter(None, os.environ.get("PUBLIC_NEEDS", "").split(",")):
    _NEEDS[_need]()
_follow()
