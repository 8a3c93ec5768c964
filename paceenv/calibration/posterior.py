"""Clusters that may be the real one: parameters drawn from a calibration's errors, for predictions and training.

Everything comes from the ``calibration`` record of a cluster config: values, errors, and the measured mean step.
Legend: N values, P parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from paceenv.calibration.parameters import NORMAL_95, Parameter
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.derive import start

DRAWS: Final = 16
"""Clusters drawn from the calibration's errors."""
CANDIDATES, SHORT_ITERATIONS = 16, 200
"""Drawn clusters for each that is kept, and the iterations that tell their mean step."""
SHORT_RUNS, USUAL_RUNS = 2, 64
"""Runs of every candidate, all on the same noise, and of the fitted cluster, which tell how lucky those few are."""
TRIES, MIN_SHARE = 1000, 0.05
"""Draws before the fitted values are taken; the share of a value that no draw falls below."""
NEGLIGIBLE: Final = 1e-4
"""A relative error below the digits of a record is none: the value is known."""
OPEN: Final = "fabric.nic_gbps"
"""Drawn evenly where the trace does not identify it: whether groups that reduce at the same time are held up by each
other or by their own links decides what pacing gains, and hardly shows in the step."""


def parameters_of(cluster: Cluster) -> list[Parameter]:
    """The parameters that a calibration wrote into a cluster config, also those that are not identified."""
    records = [*cluster.calibration.get("fitted", {}).items(), *cluster.calibration.get("cannot_tell", {}).items()]
    parameters = []
    for key, record in records:
        missing = [name for name in ("value", "se", "lo", "hi") if name not in record]
        if missing:
            raise InputError(f"{cluster.name}: calibration of {key} has no {', '.join(missing)}; allowed: all four")
        value, se, low, high = (record[name] for name in ("value", "se", "lo", "hi"))
        said = record.get("evidence", ""), record.get("top"), record.get("source", "")
        parameters.append(Parameter(key, value, se, low, high, *said))
    return parameters


def measured_step(cluster: Cluster) -> Interval | None:
    """The measured mean step in a cluster's record, seconds; without an interval where the record has no error.

    None where the record has no mean step, as after a fit of compute noise alone.
    """
    measured = cluster.calibration.get("measured", {})
    if "step_mean_s" not in measured:
        return None
    mean_s, half_s = measured["step_mean_s"], NORMAL_95 * measured.get("step_mean_se_s", math.nan)
    return Interval(mean_s, mean_s - half_s, mean_s + half_s)


def drawn_clusters(
    cluster: Cluster,
    parameters: Sequence[Parameter] | None = None,
    measured: Interval | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> list[Cluster]:
    """Clusters that may be the real one: parameters drawn from their errors so that the measured mean step results.

    A job's mean step is known better than its parameters, whose errors are drawn each by itself. So ``CANDIDATES``
    times as many clusters are drawn. For each wanted one a mean step is drawn from the interval of the measured one,
    and the candidate with the nearest mean step is taken. Without a measured mean step the first candidates are taken.
    A rate that the trace leaves open (``OPEN``) is drawn once for each wanted cluster and its candidates, so that the
    mean step, which any fit misses by a little, does not choose it. Parameters and mean step that are not given are
    those on record.
    """
    random = np.random.default_rng(seed)
    given = parameters_of(cluster) if parameters is None else parameters
    vague = [p for p in given if _can_be_drawn(cluster, p)]
    opened = next((p for p in given if p.key == OPEN and p.se is None and p.value and p.top), None)
    measured = measured_step(cluster) if measured is None else measured
    if not vague and opened is None:
        return [cluster] * draws
    is_known = measured is not None and measured.is_bounded
    each = CANDIDATES if is_known else 1
    candidates, for_N = [cluster] * draws, list(range(draws))  # at least, should most draws contradict themselves
    for d in range(draws):
        settings = [] if opened is None else [f"{OPEN}={random.uniform(*_range(cluster, opened))!r}"]
        for _ in range(each):
            values = _draw(vague, random) if vague else []
            with contextlib.suppress(InputError):
                drawn = [f"{p.key}={value!r}" for p, value in zip(vague, values, strict=True)]
                candidates.append(cluster.changed(settings + drawn, "drawn"))
                for_N.append(d)
    candidates, mine_N = candidates[-each * draws :], np.array(for_N[-each * draws :])
    if measured is None or not is_known:
        return candidates
    luck = _mean_step_s(cluster, SHORT_RUNS) / _mean_step_s(cluster, USUAL_RUNS)
    mean_s_N = np.array([_mean_step_s(candidate, SHORT_RUNS) for candidate in candidates]) / luck
    chosen = []
    sd_s = (measured.high - measured.low) / (2.0 * NORMAL_95)
    for d, wanted_s in enumerate(random.normal(measured.value, sd_s, draws)):
        off_N = np.abs(mean_s_N - wanted_s)
        nearest = int((off_N if opened is None else np.where(mine_N == d, off_N, np.inf)).argmin())
        chosen.append(candidates[nearest])
        mean_s_N[nearest] = np.inf
    return chosen


def _can_be_drawn(cluster: Cluster, parameter: Parameter) -> bool:
    """Whether a parameter has an error and is a number of this cluster that may take any value within it."""
    if parameter.value is None or not parameter.se or not math.isfinite(parameter.se):
        return False
    if parameter.se <= NEGLIGIBLE * abs(parameter.value):
        return False
    try:
        for value in (parameter.value, *_edges(parameter)):
            cluster.changed([f"{parameter.key}={float(value)!r}"], "drawn")  # a number of NumPy's is not written as one
    except InputError:
        return False
    return True


def _range(cluster: Cluster, opened: Parameter) -> tuple[float, float]:
    """Between links so slow that a group alone takes as long as all of them together, and links that limit nothing."""
    assert opened.top is not None
    groups = cluster.job.nodes // cluster.job.group_nodes
    return opened.top / groups if opened.lo is None else opened.lo, opened.top


def _edges(parameter: Parameter) -> tuple[float, float]:
    """The 95 % interval of a parameter, kept a little above 0."""
    assert parameter.value is not None
    assert parameter.se is not None
    half = NORMAL_95 * parameter.se
    low = parameter.value - half if parameter.lo is None else parameter.lo
    high = parameter.value + half if parameter.hi is None else parameter.hi
    return max(low, MIN_SHARE * abs(parameter.value)), high


def _draw(parameters: Sequence[Parameter], random: np.random.Generator) -> list[float]:
    """Values from normals whose two halves are as wide as their intervals on either side, each within its interval."""
    value_P = np.array([p.value for p in parameters])
    low_P, high_P = np.array([_edges(p) for p in parameters]).T
    for _ in range(TRIES):
        away_P = random.standard_normal(len(parameters))
        drawn_P = value_P + away_P * np.where(away_P < 0.0, value_P - low_P, high_P - value_P) / NORMAL_95
        if ((low_P <= drawn_P) & (drawn_P <= high_P)).all():
            return [float(value) for value in drawn_P]
    return [float(value) for value in value_P]


def _mean_step_s(cluster: Cluster, runs: int) -> float:
    """Of short runs without pacing."""
    simulator = start(cluster, np.arange(runs))
    return float(simulator.run(simulator.off(), SHORT_ITERATIONS).mean())
