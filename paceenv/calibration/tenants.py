"""A tenant on the uplink, seen in how long our payload takes: how often it comes, how long it stays, where it is now.

Whether there is one: what the links leave unexplained of the durations moves by more than a few per cent and is no
white noise. Which one: a Bayesian synthetic likelihood (Wood, Nature 2010; Price et al., JCGS 2018). Simulated runs as
long as the trace give mean and covariance of what is compared (moments, quantiles and autocorrelation of durations,
moments of the step), so that one trace's luck with the tenant's phase is in the error bars; a Metropolis chain gives
these. Where it is now: simulated runs whose last durations are those of the trace.

Axes: E episodes, T iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from paceenv.cluster import Cluster
from paceenv.cluster.derive import derive
from paceenv.engine.layout import LEFT_S, NEXT_S
from paceenv.engine.simulator import Simulator, episode_keys

LEAST_SPREAD: Final = 0.04
"""Durations that vary by less, relative to their mean, are steady."""
SIGNIFICANCE: Final = 1e-3
_LAGS = (1, 2, 3, 5, 8, 13)
_EPISODES = 48
_MOST_ITERATIONS = 300
_TRUST_TIME, _TRUST_CORRELATION = 0.02, 0.08
"""How far off the model may be, standard deviations: of times relative to their mean, and of autocorrelations."""
_RATIOS = (0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 1.0, 1.015, 1.03, 1.06, 1.1, 1.16, 1.25, 1.4, 1.6, 2.0)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65)
_CHAIN, _BURN = 400, 80
_RECENT, _CANDIDATES = 10, 4096
_LEAST_EFFECTIVE = 8.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TenantFit:
    """Values, standard deviations and 95 % intervals of period ratio, share and our own time alone; phase at the end.

    ``misfit_p`` is the chance that a run of the fitted model lies as far from its mean as the trace.
    ``phase`` is the share of its period that it has passed since its transfer ended, None where it cannot be told.
    """

    period_ratio: tuple[float, float, float, float]
    comm_share: tuple[float, float, float, float]
    alone_s: tuple[float, float, float, float]
    misfit_p: float
    phase: float | None
    phase_sd: float


def is_disturbed(residual_T: Array, mean_s: float) -> tuple[bool, str]:
    """Whether durations show a tenant, and the numbers that say so. ``residual_T`` is what the links do not explain."""
    spread = float(residual_T.std()) / mean_s
    n, correlation = len(residual_T), _autocorrelation(residual_T, range(1, min(10, len(residual_T) // 4) + 1))
    ljung_box = n * (n + 2) * float(np.sum(correlation**2 / (n - 1 - np.arange(len(correlation)))))
    p = float(stats.chi2.sf(ljung_box, len(correlation)))
    said = f"durations vary by {spread:.1%} beside what starts explain, white noise has p = {p:.2g}"
    return spread > LEAST_SPREAD and p < SIGNIFICANCE, said


def fit_tenant(
    make: Callable[[float, float, float], Cluster], duration_T: Array, step_T: Array, alone_s: float, seed: int = 0
) -> TenantFit:
    """The tenant under which simulated durations are like ``duration_T``.

    ``make`` gives the cluster for a period ratio, a share and our own time alone in seconds, ``alone_s`` the guess for
    the last.
    """
    iterations = min(len(duration_T), _MOST_ITERATIONS)
    observed = _summary(duration_T[None], step_T[None])[0]
    keys_E = episode_keys(list(range(seed, seed + _EPISODES)))
    scale = np.array([_TRUST_TIME] * _TIMES + [_TRUST_CORRELATION] * len(_LAGS))
    scale[:_TIMES] *= np.array([duration_T.mean()] * (_TIMES - 2) + [step_T.mean()] * 2)

    def distance(theta: Array) -> tuple[float, float]:
        """Minus twice the synthetic likelihood, and its quadratic part."""
        ratio, share, own_s = math.exp(theta[0]), float(theta[1]), math.exp(theta[2])
        if not (0.3 < ratio < 3.5 and 0.02 < share < 0.9 and 0.3 * alone_s < own_s < 2.0 * alone_s):
            return math.inf, math.inf
        values_EM = _summary(*_durations(make(ratio, share, own_s), keys_E, iterations))
        covariance = np.cov(values_EM.T) * (1.0 + 1.0 / _EPISODES) + np.diag(scale**2)
        away = observed - values_EM.mean(axis=0)
        quadratic = float(away @ np.linalg.solve(covariance, away))
        return quadratic + float(np.linalg.slogdet(covariance)[1]), quadratic

    grid = [np.array([math.log(r), s, math.log(alone_s)]) for r in _RATIOS for s in _SHARES]
    best = sorted(grid, key=lambda theta: distance(theta)[0])[:3]
    found = [
        optimize.minimize(
            lambda theta: distance(theta)[0],
            start,
            method="Nelder-Mead",
            options={
                "maxfev": 60,
                "initial_simplex": start + np.array([[0, 0, 0], [0.01, 0, 0], [0, 0.05, 0], [0, 0, -0.06]]),
            },
        )
        for start in best
    ]
    start = min(found, key=lambda f: float(f.fun)).x
    chain = _metropolis(lambda theta: distance(theta)[0], start, np.random.default_rng(seed))
    at = np.array([math.exp(start[0]), start[1], math.exp(start[2])])
    chain[:, [0, 2]] = np.exp(chain[:, [0, 2]])
    low, high = np.quantile(chain, [0.025, 0.975], axis=0)
    estimates = [
        (float(at[k]), float(chain[:, k].std()), float(min(low[k], at[k])), float(max(high[k], at[k])))
        for k in range(3)
    ]
    p = float(stats.chi2.sf(distance(start)[1], len(scale) - 3))
    phase, phase_sd = _phase_now(make(*at.tolist()), duration_T[-_RECENT:], seed)
    return TenantFit(estimates[0], estimates[1], estimates[2], p, phase, phase_sd)


def _durations(cluster: Cluster, keys_E: NDArray[np.uint64], iterations: int) -> tuple[Array, Array]:
    """Simulated durations of the payload, mean over groups, and steps, ``(E, T)``."""
    simulator = Simulator(derive(cluster, keys_E), keys_E)
    return _recorded(simulator, iterations)


def _recorded(simulator: Simulator, iterations: int) -> tuple[Array, Array]:
    recording = simulator.record(simulator.off(), iterations)
    E, T, R = recording.entry_ETR.shape
    arrival_ETG = recording.entry_ETR.reshape(E, T, simulator.batch.groups, -1).max(axis=3)
    lasts_ET: Array = (recording.finish_ETG - arrival_ETG).mean(axis=2)
    return lasts_ET, recording.step_ET


_TIMES = 7


def _summary(duration_ET: Array, step_ET: Array) -> Array:
    """What is compared: seven times in seconds, then autocorrelations of the durations, ``(E, M)``."""
    low, middle, high = np.quantile(duration_ET, [0.1, 0.5, 0.9], axis=1)
    times = [duration_ET.mean(axis=1), duration_ET.std(axis=1), low, middle, high, step_ET.mean(axis=1), step_ET.std(axis=1)]
    correlations = np.stack([_autocorrelation(d, _LAGS) for d in duration_ET])
    return np.concatenate([np.stack(times, axis=1), correlations], axis=1)


def _autocorrelation(x_T: Array, lags: tuple[int, ...] | range) -> Array:
    away_T = x_T - x_T.mean()
    variance = float(away_T @ away_T) or 1.0
    return np.array([float(away_T[lag:] @ away_T[:-lag]) / variance for lag in lags])


def _metropolis(cost: Callable[[Array], float], start: Array, rng: np.random.Generator) -> Array:
    """A random-walk Metropolis chain under minus twice a log-likelihood, ``(samples, P)``."""
    step, here, here_cost, chain, taken = np.array([0.01, 0.03, 0.02]), start, cost(start), [], 0
    for i in range(_CHAIN):
        there = here + step * rng.standard_normal(len(start))
        there_cost = cost(there)
        if math.log(rng.uniform()) < (here_cost - there_cost) / 2.0:
            here, here_cost, taken = there, there_cost, taken + 1
        if i < _BURN and i % 20 == 19:  # the size of a step settles before samples count
            step, taken = step * (1.5 if taken > 8 else 0.6 if taken < 4 else 1.0), 0
        if i >= _BURN:
            chain.append(here)
    return np.array(chain)


def _phase_now(cluster: Cluster, recent_T: Array, seed: int) -> tuple[float | None, float]:
    """Where the tenant is in its period after durations like the last ones, and the circular spread of that."""
    keys_E = episode_keys(list(range(seed, seed + _CANDIDATES)))
    simulator = Simulator(derive(cluster, keys_E), keys_E)
    lasts_ET, _ = _recorded(simulator, len(recent_T))
    away_E = (((lasts_ET - recent_T) / (0.05 * recent_T.mean())) ** 2).sum(axis=1)
    weight_E = np.exp(-(away_E - away_E.min()) / 2.0)
    if weight_E.sum() ** 2 / (weight_E**2).sum() < _LEAST_EFFECTIVE:
        return None, math.inf
    tenants, state = simulator.batch.tenants_EK, simulator.tenant_ENK[:, :, 0]
    compute_s = tenants["compute_s"][:, 0]
    transfer_s = tenants["uplink_work_s"][:, 0] / tenants["rate_cap"][:, 0]
    busy_E = state[:, LEFT_S] > 0.0
    rate_s = tenants["rate_cap"][:, 0]
    passed_s = np.where(
        busy_E,
        compute_s + transfer_s - state[:, LEFT_S] / rate_s,
        compute_s - np.clip(state[:, NEXT_S], 0.0, compute_s),
    )
    turn = np.sum(weight_E * np.exp(2j * np.pi * passed_s / (compute_s + transfer_s))) / weight_E.sum()
    spread = math.sqrt(max(-2.0 * math.log(max(abs(turn), 1e-12)), 0.0)) / (2.0 * math.pi)
    return (float(np.angle(turn) / (2.0 * np.pi)) % 1.0, spread) if spread < 0.2 else (None, spread)
