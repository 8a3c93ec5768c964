"""Hyperparameters: drawn from their ranges, changed within them. Every draw is a function of seed and place alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceenv.trainers.sweep.sweep_config import Pbt, Range

Values = dict[str, Any]
"""A value by hyperparameter."""


def draw(ranges: Mapping[str, Range], random: np.random.Generator) -> Values:
    """A value for every hyperparameter, in their order."""
    return {key: _draw(one, random) for key, one in ranges.items()}


def _draw(one: Range, random: np.random.Generator) -> Any:
    if one.choice is not None:
        return one.choice[int(random.integers(len(one.choice)))]
    if one.loguniform is not None:
        low, high = one.loguniform
        return float(f"{math.exp(random.uniform(math.log(low), math.log(high))):.4g}")
    assert one.uniform is not None
    return float(f"{random.uniform(*one.uniform):.4g}")


def changed(values: Values, ranges: Mapping[str, Range], pbt: Pbt, random: np.random.Generator) -> Values:
    """``values`` of another member, each changed a little within its range, or drawn anew (Jaderberg et al. 2017)."""
    found = {}
    for key, one in ranges.items():
        if random.random() < pbt.resample:
            found[key] = _draw(one, random)
        elif one.choice is not None:
            at = one.choice.index(values[key]) + int(random.choice([-1, 1]))
            found[key] = one.choice[min(max(at, 0), len(one.choice) - 1)]
        else:
            low, high = one.uniform or one.loguniform or (0.0, 0.0)
            found[key] = float(f"{min(max(values[key] * float(random.choice(pbt.factors)), low), high):.4g}")
    return found
