"""The live side: a guard-railed agent inside a real ``torch.distributed`` job.

``agent = live.attach(model, policy="policy.safetensors", mode="observe")`` in a training script, or, without touching
it, ``torchrun ... -m paceenv.live [options] train.py ...``. Needs the extra ``live``; imports neither Numba, Gymnasium,
Stable-Baselines3, Ray nor pydantic.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceenv.live.agent import Agent, attach

# In a checkout this folder is reached through a link in paceenv/. Import its modules from where they really lie, so
# that breakpoints and tracebacks name the files that people open. Elsewhere this changes nothing.
__path__ = [os.path.realpath(folder) for folder in __path__]

__all__ = ["Agent", "attach"]


def __getattr__(name: str) -> Any:
    """PyTorch is imported when the agent is first used, not before the user's script had its say."""
    if name in __all__:
        from paceenv.live import agent

        return getattr(agent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
