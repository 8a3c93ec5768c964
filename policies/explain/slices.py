"""Slices through a policy's settings over two of its signals, the others held. Needs numpy only.

Legend: X values of the slack share, Y values of the collective's inflation, B views, O signals, M mechanisms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.policies.base import Policy

SLACK, INFLATION = (signals.NAMES.index(name) for name in ("slack_share", "comm_inflation"))
HOLD_INTERVALS = 4
"""How long a view is held before the decision counts, so that a policy with memory has time to make up its mind."""
POINTS = 33
_SLACK_RANGE, _INFLATION_RANGE = (0.2, 0.8), (1.5, 6.0)
"""Least and greatest upper end of the axes; between them they follow what the rollout met."""


@dataclass(frozen=True)
class Slice:
    """Settings over imbalance and contention.

    Attributes:
        slack_X: slack as a share of the step.
        inflation_Y: time in the collective over its own baseline, a ratio.
        settings_YXM2: threshold and window of each mechanism.
        typical_O: the view that gives all other signals.
        remembers: whether the decision changed while the same view was held.
    """

    slack_X: NDArray[np.float64]
    inflation_Y: NDArray[np.float64]
    settings_YXM2: NDArray[np.float64]
    typical_O: NDArray[np.float32]
    remembers: bool

    @property
    def is_flat(self) -> bool:
        """Whether the settings are the same everywhere."""
        return bool((self.settings_YXM2 == self.settings_YXM2[0, 0]).all())

    def ever_on(self) -> list[str]:
        """The mechanisms that are on somewhere."""
        widest_M = self.settings_YXM2[..., pacing.WINDOW].max(axis=(0, 1))
        return [name for name, widest in zip(pacing.MECHANISMS, widest_M, strict=True) if widest > 0.0]


@dataclass(frozen=True)
class Box:
    """The calibrated range of a policy in a slice: lowest and highest slack share and inflation."""

    slack: tuple[float, float]
    inflation: tuple[float, float]

    @classmethod
    def of(cls, calibrated_range: Mapping[str, tuple[float, float]]) -> Box | None:
        """From a policy file's calibrated range; None where one of the two signals is missing."""
        if not {"slack_share", "comm_inflation"} <= set(calibrated_range):
            return None
        slack, inflation = (
            signals.unsquash(name, calibrated_range[name]).tolist() for name in ("slack_share", "comm_inflation")
        )
        return cls((slack[0], slack[1]), (float(np.exp(inflation[0])), float(np.exp(inflation[1]))))

    def outside(self, slack_B: NDArray[np.float64], inflation_B: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which positions are not in it, ``(B,)``.

        Args:
            slack_B: slack as a share of the step.
            inflation_B: inflation of the rank's collective over its baseline.
        """
        pairs = ((slack_B, self.slack), (inflation_B, self.inflation))
        return np.logical_or(*((x < low) | (x > high) for x, (low, high) in pairs))


def positions(view_BO: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where views lie in a slice: slack share and inflation, ``(B,)`` each."""
    slack_B = signals.unsquash("slack_share", view_BO[:, SLACK])
    return slack_B, np.exp(signals.unsquash("comm_inflation", view_BO[:, INFLATION]))


def views(
    typical_O: NDArray[np.float32], slack_X: NDArray[np.float64], inflation_Y: NDArray[np.float64]
) -> NDArray[np.float32]:
    """The view of every point of a slice, ``(Y * X, O)`` float32; rows of one inflation stand together.

    Args:
        typical_O: values of all other signals.
        slack_X: slack as a share of the step.
        inflation_Y: collective time over its baseline, 1 or more.
    """
    view_YXO = np.tile(np.asarray(typical_O, np.float32), (len(inflation_Y), len(slack_X), 1))
    view_YXO[..., SLACK] = [signals.squash(x, signals.SCALES[SLACK]) for x in slack_X]
    squashed_Y = [signals.squash(float(np.log(y)), signals.SCALES[INFLATION]) for y in inflation_Y]
    view_YXO[..., INFLATION] = np.array(squashed_Y)[:, None]
    return view_YXO.reshape(-1, signals.SIGNALS)


def cut(policy: Policy, view_BO: NDArray[np.float32], box: Box | None = None) -> Slice:
    """The slice of a policy through the median of some views, drawn a bit further out than views and box.

    Every point is a rank that sees the same view for ``HOLD_INTERVALS`` control intervals; its last decision counts.

    Args:
        policy: it is reset, and remembers the slice afterwards.
        view_BO: views ``(B, O)``.
        box: calibrated range, which the slice then covers as well.
    """
    slack_B, inflation_B = positions(view_BO)
    far_x, far_y = float(np.percentile(slack_B, 99.5)), float(np.percentile(inflation_B, 99.5))
    if box is not None:
        far_x, far_y = max(far_x, box.slack[1]), max(far_y, box.inflation[1])
    slack_X = np.linspace(0.0, np.clip(1.2 * far_x, *_SLACK_RANGE), POINTS)
    inflation_Y = np.geomspace(1.0, np.clip(far_y**1.2, *_INFLATION_RANGE), POINTS)
    typical_O = np.median(view_BO, axis=0).astype(np.float32)
    seen_BO = views(typical_O, slack_X, inflation_Y)
    policy.reset(len(seen_BO))
    decisions = [np.array(policy.act(seen_BO)) for _ in range(HOLD_INTERVALS)]
    remembers = any(not np.array_equal(decisions[0], later) for later in decisions[1:])
    settings_YXM2 = decisions[-1].reshape(POINTS, POINTS, len(pacing.MECHANISMS), 2)
    return Slice(slack_X, inflation_Y, settings_YXM2, typical_O, remembers)
