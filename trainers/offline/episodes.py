"""What every source of offline data is turned into: episodes of one rank, in the terms of ``paceenv/Pacing-v0``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Episode:
    """One episode; K control intervals, O signals, A action values.

    Attributes:
        view_KO: observations, one more than intervals: ``(K + 1, O)``, float32.
        action_KA: normalised actions, ``(K, A)``, float32, in [-1, 1]; -1 throughout is no pacing.
        reward_K: reward of each interval.
        record: where it is from: behaviour, source, rank or seed; plain data.
    """

    view_KO: NDArray[np.float32]
    action_KA: NDArray[np.float32]
    reward_K: NDArray[np.float64]
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        intervals = len(self.reward_K)
        if len(self.view_KO) != intervals + 1 or len(self.action_KA) != intervals:
            raise ValueError(
                f"{len(self.view_KO)} views and {len(self.action_KA)} actions of {intervals} intervals; "
                "allowed: a view more than intervals, and as many actions"
            )

    @property
    def paced(self) -> bool:
        """Whether anything but the null action was ever taken."""
        return bool((self.action_KA > -1.0).any())
