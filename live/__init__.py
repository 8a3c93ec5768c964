"""The agent inside a real ``torch.distributed`` job, under limits that it cannot exceed.

In a training script: ``agent = live.attach(model, policy="policy.safetensors", mode="observe")``. Without a change to
the script: ``torchrun ... -m paceenv.live [options] train.py ...``. Needs the extra ``live``; imports neither Numba,
Gymnasium, Stable-Baselines3, Ray nor pydantic.
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
    """Import PyTorch when the agent is first used: the script may set environment variables before."""
    if name in __all__:
        from paceenv.live import agent

        return getattr(agent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
