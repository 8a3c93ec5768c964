"""Two times of a payload, from when groups started and ended: alone, and as seconds of the whole shared uplink.

The engine's fluid uplink is replayed under the trace's own arrivals and fitted to the ends of payloads. Payloads side
by side show the sum of both times; a head start of one group separates them.

- Without a probe the fit is least squares over starts as they happened to vary. A cause that delays both a start and
  its transfer biases it.
- With a probe only the randomly drawn part of the starts counts. The instruments are derivatives of the model at
  arrivals that differ by the drawn delays alone (optimal instruments of a nonlinear model, Amemiya 1977).

Standard errors come from a jackknife that leaves out one hold of a few iterations at a time, in which draws stay as
they are; or an eighth of the trace where that is larger, as noise may outlast a hold. Errors from residuals would be
too small: a few holds carry most of the information on a group's own links, and the fit follows them (MacKinnon and
White 1985).

Axes: T iterations, G process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from paceenv.calibration.cluster_builder import AMPLE, ClusterBuilder
from paceenv.calibration.job_stamps import JobStamps
from paceenv.calibration.link_replay import share_uplink
from paceenv.calibration.measurements import ROUNDING
from paceenv.calibration.parameters import identified, not_identifiable
from paceenv.calibration.tenants import TenantSearch, is_disturbed
from paceenv.core.probing import HOLD_ITERATIONS

MAX_RELATIVE_SE: Final = 0.2
"""A number known no better counts as unknown."""
SURE: Final = 4.0
"""The cap is identified only if it lies so many standard errors from either end. Where only the uplink limits a group,
or where groups do not feel each other, a rate has no upper bound, and an estimate may be off by any factor. The
tails of a jackknife are heavy: of 91 jobs without a cap of their own three were 2.1 to 3.5 standard errors below 1."""
MIN_JITTER: Final = 0.003
"""A tenant's own jitter, where ours is less: that of any computer."""
MAX_TRANSFER_CV: Final = 1.0
"""What a cluster config allows."""
_UNIT: Final = {"nic_gbps": 1.0, "uplink_gbps": 1.0}
_OUTLIER_MADS = 10.0
_STEP = 1e-3
_PROBED_S = 1e-4
_ROUNDS = 20
_LONG_BLOCKS = 8

Array = NDArray[np.float64]


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


def fit_links(stamps: JobStamps, latency_s: float, *, known_alone_s: float | None = None) -> LinkFit:
    """Fit the two times of a job's links."""
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
    hold_T = stamps.iteration_T[use_T] // HOLD_ITERATIONS
    model = UplinkModel(arrival_TG[use_T], end_TG[use_T], stamps.group_delay_TG[use_T], hold_T, known_alone_s)
    theta = model.least_squares()
    probed = model.probed and known_alone_s is None
    if probed:
        theta = model.with_instruments(theta)
    alone_s, work_s = model.seconds(theta)
    residual_TG = end_TG - share_uplink(arrival_TG, alone_s, work_s)
    return model.with_errors(theta, LinkFit(alone_s, np.inf, work_s, np.inf, "", residual_TG, probed, outliers))


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

    def __init__(
        self,
        arrival_TG: Array,
        end_TG: Array,
        delay_TG: Array,
        hold_T: NDArray[np.int64],
        known_alone_s: float | None,
    ) -> None:
        self.arrival_TG, self.end_TG, self.known_alone_s = arrival_TG, end_TG, known_alone_s
        self.hold_T = hold_T
        self.groups = arrival_TG.shape[1]
        self.lasts_TG = end_TG - arrival_TG
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
        whole, least = np.log(np.median(self.lasts_TG)), 1.0 / self.groups
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

    def with_errors(self, theta: Array, fit: LinkFit) -> LinkFit:
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
            for block_T in (self.hold_T, _LONG_BLOCKS * np.arange(len(scores_TP)) // len(scores_TP))
        )
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


def add_links(builder: ClusterBuilder[JobStamps], probed: JobStamps) -> None:
    """Rates of the NICs and of the shared uplink, with a tenant on it or noise of transfers, and their evidence."""
    stamps = builder.stamps
    if stamps.groups > 1 and builder.seconds("uplink_work_s", **_UNIT) <= 0.0:
        builder.data["fabric"]["nodes_per_leaf"] = 1  # groups inside a leaf could not meet, and these may
    unit_alone_s, unit_work_s = (builder.seconds(key, **_UNIT) for key in ("transfer_alone_s", "uplink_work_s"))
    latency_s = builder.seconds("latency_s")
    duration_T = stamps.duration_TG.mean(axis=1)
    links = fit_links(probed, latency_s)
    if unit_alone_s <= 0.0 or duration_T.mean() <= latency_s or not links.alone_s > 0.0:
        builder.ample()
        return
    own = links if probed is stamps else fit_links(stamps, latency_s)
    known_nic = builder.known("fabric", "nic_gbps")
    if not math.isfinite(links.alone_se) and known_nic is not None and links.alone_most_s is None:
        links = fit_links(probed, latency_s, known_alone_s=unit_alone_s / known_nic)
        links = replace(links, alone_se=math.inf, why_not="", work_most_s=None)
    _put_nic(builder, links, unit_alone_s, known_nic)
    mean_s, residual_T = float(duration_T.mean()), own.residual_TG.mean(axis=1)
    disturbed, said = is_disturbed(residual_T[stamps.steady_T], mean_s, builder.measured.mean_s)
    if disturbed and unit_work_s > 0.0:
        jitter = max(builder.data["noise"]["jitter_cv"], builder.data["noise"]["imbalance_cv"], MIN_JITTER)
        cap = links.work_s * stamps.groups / links.alone_s if stamps.groups > 1 else 1.0
        if TenantSearch(builder, cap, unit_alone_s, unit_work_s, latency_s, jitter).add():
            return
        said = "durations vary in a way that no one periodic tenant explains"
    _put_uplink(builder, links, unit_work_s)
    builder.add(not_identifiable("tenants", 0.0, said, "none assumed"))
    cv, se = transfer_cv(own, stamps.duration_TG, stamps.steady_T)
    said = "what each group's payloads differ from the links' model"
    if cv > MAX_TRANSFER_CV:
        said += f": {cv:.3g}, of which the simulator has {MAX_TRANSFER_CV:g} at most"
    builder.put(identified("noise.transfer_cv", min(cv, MAX_TRANSFER_CV), se, said))


def _put_nic(builder: ClusterBuilder[JobStamps], links: LinkFit, unit_alone_s: float, known: float | None) -> None:
    gbps = unit_alone_s / links.alone_s
    if math.isfinite(links.alone_se):
        builder.put(identified("fabric.nic_gbps", gbps, gbps * (links.alone_se / links.alone_s), _how(links)))
        return
    why = links.why_not or "starts vary too little to separate a group's own cap from the uplink's share"
    least = None if links.alone_most_s is None else unit_alone_s / links.alone_most_s
    if known is not None and least is not None and known < least:
        known = None
    gbps, source = (gbps, "the best fit") if known is None else (known, "from base")
    parameter = not_identifiable("fabric.nic_gbps", gbps, why, source, lo=least)
    if known is None and builder.stamps.groups > 1:  # from there on the uplink alone limits a group
        parameter = replace(parameter, top=unit_alone_s / links.work_s)
    builder.put(parameter)


def _put_uplink(builder: ClusterBuilder[JobStamps], links: LinkFit, unit_work_s: float) -> None:
    gbps, known = unit_work_s / links.work_s, builder.known("fabric", "uplink_gbps")
    if math.isfinite(links.work_se):
        builder.put(identified("fabric.uplink_gbps", gbps, gbps * (links.work_se / links.work_s), _how(links)))
        return
    limits = builder.stamps.groups > 1
    most_s = links.work_most_s if limits else links.alone_s / builder.stamps.groups
    least = None if most_s is None or unit_work_s <= 0.0 else unit_work_s / most_s
    if known is not None and least is not None and (known < least or links.alone_most_s is not None):
        known = None  # the trace shows more, or that this or a group's own links limit it
    source = "from base" if known is not None else "the best fit" if limits else "assumed not to limit"
    gbps = gbps if limits else AMPLE * max(builder.data["fabric"]["nic_gbps"], least or 0.0)
    gbps = gbps if known is None else known
    builder.put(not_identifiable("fabric.uplink_gbps", gbps, links.why_not, source, lo=least))


def _how(links: LinkFit) -> str:
    way = (
        "response of payloads to delays taken on purpose"
        if links.probed
        else "payloads against starts as they happened to vary"
    )
    left = f", {links.outliers} iterations left out" if links.outliers else ""
    return f"{way}; what is left varies by {links.residual_TG.std() * 1e3:.3g} ms{left}"
