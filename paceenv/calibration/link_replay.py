"""The engine's links under a trace's own arrivals: when payloads would end, and two times of a payload fitted to that.

Compiles the engine's functions (``paceenv.sim.engine.fluid``, ``incast``) into loops over recorded iterations, so that
calibration and simulation share their physics.

The two times are alone, and as seconds of the whole shared uplink. Payloads side by side show the sum of both; a head
start of one group separates them.

- Without a probe the fit is least squares over starts as they happened to vary. A cause that delays both a start and
  its transfer biases it.
- With a probe only the randomly drawn part of the starts counts. The instruments are derivatives of the model at
  arrivals that differ by the drawn delays alone (optimal instruments of a nonlinear model, Amemiya 1977).

Standard errors come from a jackknife that leaves out one hold of a few iterations at a time, in which draws stay as
they are; or an eighth of the trace where that is larger, as noise may outlast a hold. Errors from residuals would be
too small: a few holds carry most of the information on a group's own links, and the fit follows them (MacKinnon and
White 1985).

Axes: T iterations, R ranks, G process groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.noise_fit import ROUNDING
from paceenv.core.probing import HOLD_ITERATIONS
from paceenv.sim.engine import compiled, fluid, incast, layout
from paceenv.sim.engine.code_cache import numba_cache
from paceenv.sim.engine.draws import normal_table
from paceenv.sim.engine.simulator import episode_keys

MAX_RELATIVE_SE: Final = 0.2
"""A number known no better counts as unknown."""
SURE: Final = 4.0
"""The cap is identified only if it lies so many standard errors from either end. Where only the uplink limits a group,
or where groups do not feel each other, a rate has no upper bound, and an estimate may be off by any factor. The
tails of a jackknife are heavy: of 91 jobs without a cap of their own three were 2.1 to 3.5 standard errors below 1."""
_OUTLIER_MADS = 10.0
_STEP = 1e-3
_PROBED_S = 1e-4
_ROUNDS = 20
_LONG_BLOCKS = 8

Array = NDArray[np.float64]


def _share(
    jobs: Any,
    clocks: Any,
    tenants_EK: Any,
    tenant: Array,
    normal: Array,
    arrival_TG: Array,
    finish_TG: Array,
) -> None:
    order_G = np.arange(arrival_TG.shape[1])
    for t in range(arrival_TG.shape[0]):
        clocks[0]["link_s"] = 0.0
        fluid.sort(arrival_TG[t], order_G)
        fluid.share_uplink(jobs[0], clocks[0], tenants_EK[0], tenant, normal, order_G, arrival_TG[t], finish_TG[t])


def _receive(
    jobs: Any, clocks: Any, delay_R: NDArray[np.float32], entry_TR: Array, finish_TG: Array, scratch: layout.Scratch
) -> None:
    for t in range(entry_TR.shape[0]):
        clocks[0]["iteration"] = t
        scratch.compute_R[:] = entry_TR[t]
        incast.receive_all(jobs[0], clocks[0], delay_R, scratch)
        finish_TG[t] = scratch.finish_G


with numba_cache(compiled.cache_directory()) as _writable:
    _share_compiled, _receive_compiled = (
        numba.njit(nogil=True, cache=_writable, error_model="numpy")(f) for f in (_share, _receive)
    )


def share_uplink(arrival_TG: Array, alone_s: float, work_s: float) -> Array:
    """When each group's payload ends on an uplink that only these groups share and each fills for ``work_s``, s."""
    jobs, finish_TG = layout.default_job(1), np.empty_like(arrival_TG)
    jobs["transfer_alone_s"], jobs["uplink_work_s"] = alone_s, work_s
    nobody = np.zeros((1, 0), layout.TENANT), np.zeros((layout.TENANT_FIELDS, 0))
    clocks = np.zeros(1, layout.CLOCK)
    _share_compiled(jobs, clocks, *nobody, normal_table(), np.ascontiguousarray(arrival_TG), finish_TG)
    return finish_TG


def receive(
    entry_TR: Array,
    groups: int,
    *,
    exchange: bool,
    message_s: float,
    fit: float = np.inf,
    timeout_s: float = 0.0,
    seed: int = 0,
) -> Array:
    """When each group's gather or all-to-all ends, ``(T, G)``, seconds; every seed draws new losses."""
    jobs, finish_TG = layout.default_job(1), np.empty((len(entry_TR), groups))
    jobs["incast_kind"] = layout.ALL_TO_ALL if exchange else layout.GATHER
    jobs["incast_flow_s"], jobs["incast_fit"], jobs["incast_timeout_s"] = message_s, fit, timeout_s
    clocks = np.zeros(1, layout.CLOCK)
    clocks["key"] = episode_keys([seed])
    ranks = entry_TR.shape[1]
    scratch = layout.zeros(layout.Scratch, {"R": ranks, "G": groups, "J": ranks, "F": 0, "M": 0, "2": 2})
    _receive_compiled(jobs, clocks, np.zeros(ranks, np.float32), np.ascontiguousarray(entry_TR), finish_TG, scratch)
    return finish_TG


@dataclass(frozen=True)
class LinkFit:
    """``alone_s`` and ``work_s``, seconds, with standard errors; an infinite one means not identified, see ``why_not``.

    ``residual_TG`` is measured minus modelled duration over all iterations. ``probed`` says whether random delays
    identified the times, ``outliers`` how many iterations were left out. ``alone_most_s`` is an upper bound, given
    where the uplink itself may limit a group alone; ``work_most_s`` likewise where the uplink may limit no group.
    """

    alone_s: float
    alone_se: float
    work_s: float
    work_se: float
    why_not: str
    residual_TG: Array
    probed: bool
    outliers: int
    alone_most_s: float | None = None
    work_most_s: float | None = None


class PayloadFit(NamedTuple):
    """The links' fit to a job's own payloads, and what an unlimited link of a Gb/s would take, seconds.

    ``cap`` is how many times the NICs of a group can fill its share of the uplink, from the links alone;
    ``unit_alone_s`` is of a group alone, ``unit_whole_s`` of all groups on the uplink; ``latency_s`` comes on top.
    """

    own: LinkFit
    cap: float
    unit_alone_s: float
    unit_whole_s: float
    latency_s: float


def fit_links(stamps: JobStamps, latency_s: float, *, known_alone_s: float | None = None) -> LinkFit:
    arrival_TG, end_TG = stamps.arrival_TG, stamps.finish_TG - latency_s
    lasts_TG = np.maximum(end_TG - arrival_TG, 0.0)
    typical_s = float(np.median(lasts_TG))
    away_T = np.abs(lasts_TG - np.median(lasts_TG, axis=0)).max(axis=1)
    use_T = away_T <= _OUTLIER_MADS * max(float(np.median(away_T)), 1e-3 * typical_s)
    outliers = int((~use_T).sum())
    if stamps.groups == 1 or typical_s <= 0.0:
        mean_s = float(lasts_TG[use_T].mean())
        se = float(lasts_TG[use_T].std(ddof=1) / np.sqrt(use_T.sum()))
        why = "with one process group its own links and the uplink look the same"
        return LinkFit(mean_s, se, mean_s, np.inf, why, lasts_TG - mean_s, False, outliers)
    delay_TG, hold_T = stamps.of_groups(stamps.delay_TR)[use_T], stamps.iteration_T[use_T] // HOLD_ITERATIONS
    model = UplinkModel(arrival_TG[use_T], end_TG[use_T], delay_TG, known_alone_s)
    theta = model.least_squares()
    probed = model.probed and known_alone_s is None
    if probed:
        theta = model.with_instruments(theta)
    alone_s, work_s = model.seconds(theta)
    residual_TG = end_TG - share_uplink(arrival_TG, alone_s, work_s)
    fit = LinkFit(alone_s, np.inf, work_s, np.inf, "", residual_TG, probed, outliers)
    return model.with_errors(theta, fit, hold_T)


def transfer_cv(links: LinkFit, duration_TG: Array, where_T: NDArray[np.bool_]) -> tuple[float, float]:
    """How much a group's duration differs from the model's, relative to it, per iteration; and its standard error.

    A constant difference between groups is not noise, outliers do not count, and less than ``ROUNDING`` is none.
    """
    relative_TG = (links.residual_TG / (duration_TG - links.residual_TG))[where_T]
    away_T = np.abs(relative_TG - np.median(relative_TG, axis=0)).max(axis=1)
    relative_TG = relative_TG[away_T <= _OUTLIER_MADS * np.median(away_T)]
    T = len(relative_TG)
    square_T = ((relative_TG - relative_TG.mean(axis=0)) ** 2).mean(axis=1) * T / (T - 1)
    cv = float(np.sqrt(square_T.mean()))
    cv = cv if cv > ROUNDING else 0.0
    return cv, float(square_T.std(ddof=1) / np.sqrt(T)) / (2.0 * cv) if cv > 0.0 else 0.0


class UplinkModel:
    """End times as a function of theta: the logarithm of the whole, and a group's own cap as a share of the uplink.

    The whole is what all groups occupy of the uplink together; the cap (work over time alone) runs from 1 / G, where a
    group never feels the others, to 1. A known time alone leaves the whole only.
    """

    def __init__(self, arrival_TG: Array, end_TG: Array, delay_TG: Array, known_alone_s: float | None = None) -> None:
        self.arrival_TG, self.end_TG, self.known_alone_s = arrival_TG, end_TG, known_alone_s
        self.groups = arrival_TG.shape[1]
        relative_TG = delay_TG - delay_TG.mean(axis=1, keepdims=True)
        self.probed = float(relative_TG.std()) > _PROBED_S
        # arrivals as they would have been had the drawn delays been all that made them differ
        self.drawn_TG = arrival_TG.mean(axis=0) + delay_TG - delay_TG.mean(axis=0)

    def seconds(self, theta: Array) -> tuple[float, float]:
        work_s = float(np.exp(theta[0])) / self.groups
        if self.known_alone_s is not None:
            return self.known_alone_s, work_s
        return work_s / float(theta[1]), work_s

    def ends(self, theta: Array, arrival_TG: Array) -> Array:
        return share_uplink(arrival_TG, *self.seconds(theta))

    def jacobian(self, theta: Array, arrival_TG: Array) -> Array:
        """Derivatives of the ends, ``(T, G, P)``, as one-sided differences that stay inside the bounds."""
        here_TG, columns = self.ends(theta, arrival_TG), []
        for k in range(len(theta)):
            step = np.zeros_like(theta)
            step[k] = -_STEP if k and theta[k] > 1.0 - _STEP else _STEP
            columns.append((self.ends(theta + step, arrival_TG) - here_TG) / step[k])
        return np.stack(columns, axis=-1)

    def residual(self, theta: Array) -> Array:
        return self.end_TG - self.ends(theta, self.arrival_TG)

    def least_squares(self) -> Array:
        whole, least = np.log(np.median(self.end_TG - self.arrival_TG)), 1.0 / self.groups
        starts = [[whole]] if self.known_alone_s is not None else [[whole, c] for c in (1.2 * least, 0.5, 0.9)]
        bounds = ([-np.inf, least][: len(starts[0])], [np.inf, 1.0][: len(starts[0])])
        solutions = [
            optimize.least_squares(
                lambda theta: self.residual(theta).ravel(),
                np.clip(start, *bounds),
                bounds=bounds,
                diff_step=_STEP,
                x_scale=0.1,
            )
            for start in starts
        ]
        best: Array = min(solutions, key=lambda f: float(f.cost)).x
        return best

    def with_instruments(self, theta: Array) -> Array:
        """Solve the moment conditions of the instruments by Newton steps of at most a tenth."""
        for _ in range(_ROUNDS):
            z, x = (self.jacobian(theta, a).reshape(-1, len(theta)) for a in (self.drawn_TG, self.arrival_TG))
            step = np.linalg.lstsq(z.T @ x, z.T @ self.residual(theta).ravel(), rcond=1e-9)[0]
            theta = theta + np.clip(step, -0.1, 0.1)
            theta[1] = np.clip(theta[1], 1.0 / self.groups, 1.0)
            if np.abs(step).max() < 1e-5:
                break
        return theta

    def with_errors(self, theta: Array, fit: LinkFit, hold_T: NDArray[np.int64]) -> LinkFit:
        """The fit with the standard errors of time alone and work, and why one is infinite.

        A cap of 1 is the end of what can be seen: near it only what a group takes alone at most is known. Near the
        other end the same holds for the uplink.
        """
        x_TGP = self.jacobian(theta, self.arrival_TG)
        z_TGP = self.jacobian(theta, self.drawn_TG) if fit.probed else x_TGP
        scores_TP = np.einsum("tgp,tg->tp", z_TGP, self.residual(theta))
        bread_TPP = np.einsum("tgp,tgq->tpq", z_TGP, x_TGP)
        size_P = np.abs(np.diag(bread_TPP.sum(axis=0)))
        free = size_P > 1e-9 * size_P.max()
        inner = np.ix_(free, free)
        by_holds, by_eighths = (
            jackknife(scores_TP[:, free], bread_TPP[:, free][:, :, free], block_T)
            for block_T in (hold_T, _LONG_BLOCKS * np.arange(len(scores_TP)) // len(scores_TP))
        )
        with np.errstate(invalid="ignore"):  # where neither is finite
            factor = np.sqrt(np.maximum(np.diag(by_eighths) / np.maximum(np.diag(by_holds), 1e-300), 1.0))
        covariance = np.full((len(theta),) * 2, np.inf)
        covariance[inner] = by_holds * np.outer(factor, factor)
        alone_s, work_s = fit.alone_s, fit.work_s
        work_se = work_s * float(np.sqrt(covariance[0, 0]))
        if self.known_alone_s is not None:
            if work_s <= alone_s / self.groups * (1.0 + _STEP):
                why = "side by side a group takes as long as alone: the uplink is no limit"
                return replace(fit, alone_se=0.0, why_not=why, work_most_s=work_s)
            return replace(fit, alone_se=0.0, work_se=work_se)
        cap, cap_se = float(theta[1]), float(np.sqrt(covariance[1, 1]))
        gradient = np.array([1.0, -1.0 / cap])
        alone_se = alone_s * float(np.sqrt(gradient @ covariance @ gradient)) if free.all() else np.inf
        alone_most_s = work_s / max(cap - 2.0 * cap_se, 1.0 / self.groups)
        work_most_s = work_s + 2.0 * work_se
        may_be_unlimited = cap - SURE * cap_se < 1.0 / self.groups
        may_be_uncapped = cap + SURE * cap_se > 1.0 - _STEP
        if not cap_se < MAX_RELATIVE_SE * cap:
            why = "all groups transfer at the same time, and starts vary too little to identify a group's own cap"
            return replace(fit, work_se=np.inf if cap - 2.0 * cap_se < 1.0 / self.groups else work_se, why_not=why)
        if may_be_unlimited and may_be_uncapped:
            why = "starts vary too little to separate a group's own links from the uplink"
            return replace(fit, why_not=why, alone_most_s=alone_most_s, work_most_s=work_most_s)
        if may_be_unlimited:
            why = "side by side a group takes about as long as alone: the uplink may be no limit"
            return replace(fit, alone_se=alone_se, why_not=why, work_most_s=work_most_s)
        if may_be_uncapped:
            why = "alone a group has about the whole uplink: its own links may be faster"
            return replace(fit, work_se=work_se, why_not=why, alone_most_s=alone_most_s)
        return replace(fit, alone_se=alone_se, work_se=work_se)


def jackknife(scores_TP: Array, bread_TPP: Array, block_T: NDArray[np.int64]) -> Array:
    """Covariance of the solution of the moments ``scores`` with derivatives ``bread``, by leaving out blocks.

    One Newton step away from the whole solution; infinite where without some block nothing would be known.
    """
    which_T = np.unique(block_T, return_inverse=True)[1]
    blocks = int(which_T.max()) + 1
    score_BP, left_BPP = np.zeros((blocks, scores_TP.shape[1])), np.zeros((blocks, *bread_TPP.shape[1:]))
    np.add.at(score_BP, which_T, scores_TP)
    np.add.at(left_BPP, which_T, -bread_TPP)
    left_BPP += bread_TPP.sum(axis=0)
    if blocks < 2 or (np.linalg.cond(left_BPP) > 1e12).any():
        return np.full(bread_TPP.shape[1:], np.inf)
    moved_BP = np.linalg.solve(left_BPP, score_BP[..., None])[..., 0]
    moved_BP -= moved_BP.mean(axis=0)
    return np.asarray((blocks - 1) / blocks * moved_BP.T @ moved_BP)
