"""Clusters that may be the real one: parameters drawn from a calibration's errors, for predictions and for training.

Legend: N values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from paceenv.calibration.parameters import Parameter
from paceenv.cluster import Cluster
from paceenv.cluster.derive import derive
from paceenv.engine.simulator import Simulator, episode_keys
from paceenv.errors import InputError

DRAWS: Final = 16
"""Clusters drawn from the calibration's errors."""
CANDIDATES, SHORT_ITERATIONS = 16, 200
"""Drawn clusters for each that is kept, and the iterations that tell their mean step."""
NORMAL_95: Final = 1.96
TRIES, LEAST_SHARE = 100, 0.05
"""Draws of a value before the fitted one is taken; the share of it that no draw falls below."""


def parameters_of(cluster: Cluster) -> list[Parameter]:
    """The parameters that a calibration wrote into a cluster config, those that the trace did not tell included."""
    records = [*cluster.calibration.get("fitted", {}).items(), *cluster.calibration.get("cannot_tell", {}).items()]
    return [
        Parameter(key, record["value"], record["se"], record["lo"], record["hi"], record["evidence"])
        for key, record in records
    ]


def drawn_clusters(
    cluster: Cluster, parameters: Sequence[Parameter], measured: Mapping[str, float], seed: int, draws: int = DRAWS
) -> list[Cluster]:
    """Clusters that may be the real one: parameters drawn from their errors, such that the measured mean step results.

    A job's mean step is known better than the parameters one by one, whose errors hang together. So ``CANDIDATES``
    times as many clusters are drawn; for each that is wanted a mean step is drawn from the interval of the measured one
    (``mean_s``, ``low_s`` and ``high_s`` of ``measured``), and the candidate taken whose own comes nearest.
    """
    random, vague = np.random.default_rng(seed), [p for p in parameters if _can_be_drawn(cluster, p)]
    if not vague:
        return [cluster] * draws
    candidates = [cluster] * draws  # at least, should most draws contradict themselves
    for _ in range(CANDIDATES * draws):
        with contextlib.suppress(InputError):
            candidates.append(cluster.changed([f"{p.key}={_draw(p, random)!r}" for p in vague], "drawn"))
    candidates = candidates[-CANDIDATES * draws :]
    mean_s_N = np.array([_mean_step_s(candidate) for candidate in candidates])
    found = []
    for wanted_s in random.normal(
        measured["mean_s"], (measured["high_s"] - measured["low_s"]) / (2.0 * NORMAL_95), draws
    ):
        nearest = int(np.abs(mean_s_N - wanted_s).argmin())
        found.append(candidates[nearest])
        mean_s_N[nearest] = np.inf
    return found


def _can_be_drawn(cluster: Cluster, parameter: Parameter) -> bool:
    """Whether a parameter has an error and is a number of this cluster that may take any value within it."""
    if parameter.value is None or not parameter.se or not math.isfinite(parameter.se):
        return False
    try:
        for value in (parameter.value, *_edges(parameter)):
            cluster.changed([f"{parameter.key}={value!r}"], "drawn")
    except InputError:
        return False
    return True


def _edges(parameter: Parameter) -> tuple[float, float]:
    """The 95 % interval of a parameter, kept a little above 0."""
    assert parameter.value is not None
    assert parameter.se is not None
    low, high = (
        parameter.value + sign * NORMAL_95 * parameter.se if edge is None else edge
        for sign, edge in ((-1.0, parameter.lo), (1.0, parameter.hi))
    )
    return max(low, LEAST_SHARE * abs(parameter.value)), high


def _draw(parameter: Parameter, random: np.random.Generator) -> float:
    """A value from the normal of its error within its interval."""
    assert parameter.value is not None
    assert parameter.se is not None
    low, high = _edges(parameter)
    for _ in range(TRIES):
        if low <= (value := float(random.normal(parameter.value, parameter.se))) <= high:
            return value
    return parameter.value


def _mean_step_s(cluster: Cluster) -> float:
    """Of a short run without pacing."""
    keys_E = episode_keys([0, 1])
    simulator = Simulator(derive(cluster, keys_E), keys_E)
    return float(simulator.run(simulator.off(), SHORT_ITERATIONS).mean())
