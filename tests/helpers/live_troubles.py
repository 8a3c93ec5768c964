"""What can go wrong in a job that the agent watches, done for real: bad policies, stopped ranks, stepping clocks."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import live_bodies
import numpy as np
import torch.distributed as dist

from paceenv.core import pacing
from paceenv.policies.base import Policy

WHEN = 30
"""The iteration in which it happens: the agent has learned the job by then, and paces it."""
STOPPED_S = 0.5
STEP_S = 3600.0
STEPPED = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")


class Bad(Policy):
    """Delays like ``live_bodies.delaying_policy``, and from its third decision on does what it is called after."""

    def __init__(self, name: str) -> None:
        self.name, self._decisions, self._good = name, 0, live_bodies.delaying_policy()

    def act(self, signals_BO: np.ndarray) -> np.ndarray:
        self._decisions += 1
        settings = np.array(self._good.act(signals_BO))
        if self._decisions < 3:
            return settings
        if self.name == "raises":
            raise RuntimeError("no idea what to do")
        if self.name == "shapeless":
            return settings[0]
        if self.name == "slow":
            time.sleep(1.0)
        settings[..., pacing.WINDOW] = {"not-a-number": np.nan, "huge": 1e9}.get(self.name, 0.5)
        return settings


BAD = ("raises", "shapeless", "not-a-number", "huge", "slow")


def killed() -> None:
    """Rank 1 is gone at once."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    """Rank 1 is stopped from outside for a while."""
    if dist.get_rank() == 1:
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


TROUBLES: dict[str, Callable[[], None]] = {"killed": killed, "stopped": stopped}


def step_clocks() -> None:
    """Every clock that Python reads jumps by an hour, forward and back, again and again; call it before ``live``."""
    for name in STEPPED:
        read, readings = getattr(time, name), itertools.count()
        by = type(read())(STEP_S * (1e9 if name.endswith("_ns") else 1.0))
        setattr(time, name, lambda read=read, readings=readings, by=by: read() + by * (next(readings) // 97 % 3 - 1))


def trouble(
    *,
    mode: str = "",
    policy: str = "",
    what: str = "",
    stepping: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train under the agent, or without one if ``mode`` is empty, with a bad policy or a trouble on the way.

    ``policy`` is a kind of :class:`Bad`, or what ``live.attach`` takes. Returns losses, a digest of the final
    parameters, and the agent's last summary.
    """
    if stepping:
        step_clocks()
    training, agent = live_bodies.WAYS["ddp"](), None
    if mode:
        from paceenv import live

        chosen: Any = Bad(policy) if policy in BAD else policy or live_bodies.delaying_policy()
        agent = live.attach(training.attached, policy=chosen, mode=mode, **live_bodies.SHORT | options)
    losses = []
    for iteration in range(live_bodies.ITERATIONS):
        if iteration == WHEN and what:
            TROUBLES[what]()
        losses.append(float(training.step(iteration)))
    if agent is not None:
        agent.detach()
    return {
        "losses": losses,
        "digest": live_bodies.digest(training),
        "summary": None if agent is None else agent.summary(),
    }


def troubles(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several of them, one after the other in one job."""
    return [trouble(**run) for run in runs]
