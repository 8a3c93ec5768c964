"""Splits durations of compute into components, one per cause, that multiply or add up to the trace.

    duration = kind * stage * rank * common * episode * drift * data * rest + stall

| component | meaning |
| --- | --- |
| kind, common | the usual time of an operation, and what all ranks share in a step; always stay |
| stage, rank | fixed per pipeline stage and per rank: of all its compute (slow ranks) or of a kind (unequal work) |
| episode | moves between two levels |
| drift | moves slowly |
| data | common to the forward and the backward pass of a micro-batch |
| rest | without memory |
| stall | beyond the tail of the bulk |

Data, rest and stalls are fitted to single operations, the others to a rank's compute per step.
Axes: N operations (here only those that compute), R ranks, T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.two_state_fit import fit_two_states
from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.diagnosis.outliers import stall_threshold

MAX_BETWEEN: Final = 0.1
"""Share of steps between the two levels up to which a rank counts as having episodes."""
SIGNIFICANT: Final = 4.0
"""Standard errors by which a skewness differs from none, a rank from its peers ..."""
MIN_RANK: Final = 0.005
"""... and at least by this share."""
MIN_EPISODE: Final = 0.08
MIN_AUTOCORRELATION: Final = 0.05
"""Compute drifts if its autocorrelation from one step to the next is at least this."""
MIN_DRIFT_STEPS: Final = 3.0
"""A shorter memory is no drift."""
MIN_PAIRED: Final = 0.3
"""Forward and backward pass share data if they correlate at least this much."""
_PEERS: Final = 3
_LEAST: Final = 1e-3
"""Share of the most that any rank computes in a place: a usual time of 0 would make its factor infinite."""


@dataclass(frozen=True)
class Components:
    """What makes up the durations of the operations ``operation``: a base, times factors, plus seconds, by component.

    All are ``(n, T)`` or ``(n, 1)`` for these operations.
    """

    operation: Integers
    base_s: Array
    factors: dict[str, Array]
    seconds: dict[str, Array]


@dataclass(frozen=True)
class ComputeAttribution(Components):
    """Components of compute, and what they say of ranks.

    ``rank_R`` is the factor of all compute of a rank, 1 where it is no other than its peers'; ``episode_RT`` tells when
    a rank is in an episode. ``paired`` is the correlation of forward and backward passes (not a number without both).
    ``skewness`` is of a rank's ``rest`` per step, 0 where it may be chance; ``rest_cv_R`` is its spread on each rank.
    ``twins`` says whether every rank has a peer to compare it with.
    """

    rank_R: Array
    episode_RT: NDArray[np.bool_]
    drift_steps: float
    paired: float
    skewness: float
    rest_cv_R: Array
    twins: bool


def attribute_compute(matrix: OperationMatrix, own_NT: Array) -> ComputeAttribution:
    """Split the compute of a job; ``own_NT`` are durations without waiting, seconds."""
    operation = np.flatnonzero(matrix.is_compute_N & matrix.usual_N & (own_NT > 0.0).any(axis=1))
    d_NT, rank, stage = own_NT[operation], matrix.rank_N[operation], matrix.stage_N[operation]
    ranks = len(matrix.ranks)
    stage_R = np.zeros(ranks, np.int64)
    stage_R[rank] = stage
    typical_N = np.maximum(np.median(d_NT, axis=1), 1e-12)
    load_RT = _per_rank(d_NT, rank, ranks) / _per_rank(typical_N[:, None], rank, ranks)
    common_T = _common(load_RT)
    episode_RT, factor_RT = _episodes(load_RT / common_T)
    drift_RT, drift_steps, drift_cv = _drift(load_RT / common_T / factor_RT)
    course_NT = (common_T * factor_RT * drift_RT)[rank]
    v_NT = d_NT / typical_N[:, None] / course_NT
    stalled_NT = _stalls(matrix, operation, v_NT)
    v_NT = np.where(stalled_NT, np.median(v_NT, axis=1, keepdims=True), v_NT)
    stall_s = np.where(stalled_NT, d_NT - v_NT * typical_N[:, None] * course_NT, 0.0)
    clean_NT = v_NT * typical_N[:, None]
    drift_se = drift_cv * math.sqrt(min(2.0 * drift_steps / matrix.steps, 1.0))
    base_N, stage_N, rank_R, twins = _fixed_factors(matrix, operation, clean_NT, stage_R, drift_se)
    factor_N = _rank_factors(matrix, operation, clean_NT, base_N * stage_N, rank_R, drift_se)
    if drift_steps:  # what a rank differs by without lasting is where its drift happened to be
        weight_R = np.bincount(rank, base_N * stage_N * factor_N, ranks)
        of_rank_R = np.bincount(rank, clean_NT.mean(axis=1), ranks) / np.maximum(weight_R, 1e-300)
        differs_R = np.bincount(rank, factor_N != 1.0, ranks) > 0
        drift_RT = drift_RT * np.where(differs_R, 1.0, of_rank_R)[:, None]
        clean_NT = clean_NT / np.where(differs_R, 1.0, of_rank_R)[rank][:, None]
    usual_N = np.maximum(base_N * stage_N * factor_N, 1e-300)[:, None]
    left_NT = clean_NT / usual_N
    data_NT, paired = _data(matrix, operation, left_NT)
    rest_NT = left_NT / data_NT
    rest_RT = _per_rank(rest_NT * usual_N, rank, ranks) / _per_rank(usual_N, rank, ranks)
    x = rest_RT - rest_RT.mean(axis=1, keepdims=True)
    sd = float(x.std())
    kept = x[np.abs(x) < 8.0 * sd] if sd > 0.0 else x.ravel()
    skewness = float((kept**3).mean() / max(kept.std(), 1e-12) ** 3) if sd > 1e-9 else 0.0
    factors = {"stage": stage_N[:, None], "rank": factor_N[:, None], "episode": factor_RT[rank]}
    return ComputeAttribution(
        operation,
        base_N[:, None] * common_T,
        factors | {"drift": drift_RT[rank], "data": data_NT, "rest": rest_NT},
        {"stall": stall_s},
        rank_R=rank_R,
        episode_RT=episode_RT,
        drift_steps=drift_steps,
        paired=paired,
        skewness=skewness if skewness >= SIGNIFICANT * math.sqrt(6.0 / max(kept.size, 6)) else 0.0,
        rest_cv_R=x.std(axis=1),
        twins=twins,
    )


def _per_rank(x_NT: Array, rank: Integers, ranks: int) -> Array:
    out = np.zeros((ranks, x_NT.shape[1]))
    np.add.at(out, rank, x_NT)
    return np.maximum(out, 1e-12)


def _common(load_RT: Array) -> Array:
    """What all ranks have in common in a step; 1 with few ranks, whose own noise would look the same."""
    if len(load_RT) < _PEERS:
        return np.ones(load_RT.shape[1])
    common_T = np.median(load_RT, axis=0)
    return np.asarray(common_T / common_T.mean())


def _episodes(load_RT: Array) -> tuple[NDArray[np.bool_], Array]:
    on_RT = np.stack([fit_two_states(x, MIN_EPISODE * float(np.median(x))) for x in load_RT])
    factor_RT = np.ones_like(load_RT)
    for r in np.flatnonzero(on_RT.any(axis=1)):
        high, low = np.median(load_RT[r, on_RT[r]]), np.median(load_RT[r, ~on_RT[r]])
        if not high > low > 0.0:  # no two levels
            on_RT[r] = False
            continue
        place_T = (load_RT[r] - low) / (high - low)
        if np.mean((place_T > 0.3) & (place_T < 0.7)) > MAX_BETWEEN:  # it wanders
            on_RT[r] = False
        else:
            factor_RT[r, on_RT[r]] = high / low
    return on_RT, factor_RT


def _drift(load_RT: Array) -> tuple[Array, float, float]:
    """A slow course per rank, as a first-order autoregression under white noise sees it; its memory in steps, its CV.

    Both variances and the memory (correlation time) come from the autocovariances of all ranks together.
    """
    ranks, steps = load_RT.shape
    middle = np.median(load_RT, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(load_RT - middle), axis=1, keepdims=True)
    x_RT = np.clip(load_RT, middle - 4.0 * spread, middle + 4.0 * spread)
    mean = x_RT.mean(axis=1, keepdims=True)
    x_RT = x_RT / mean - 1.0
    variance, lags = float((x_RT**2).mean()), np.arange(1, max(min(steps // 4, 64), 2))
    if steps < 8 or variance < 1e-12:
        return np.ones_like(load_RT), 0.0, 0.0
    covariance = np.array([float((x_RT[:, k:] * x_RT[:, :-k]).mean()) for k in lags])
    if covariance[0] < max(SIGNIFICANT / math.sqrt(ranks * steps), MIN_AUTOCORRELATION) * variance:
        return np.ones_like(load_RT), 0.0, 0.0
    best, signal, steps_s = math.inf, 0.0, 0.0
    for tau in np.geomspace(1.0, steps / 2.0, 24):
        # less what the mean over a finite trace has taken off every covariance
        course = np.exp(-lags / tau) - 2.0 * tau / steps * (1.0 - tau / steps * (1.0 - math.exp(-steps / tau)))
        part = float(course @ covariance / (course @ course))
        misfit = float(((covariance - part * course) ** 2).sum())
        if misfit < best:
            best, signal, steps_s = misfit, part, float(tau)
    cv, signal = math.sqrt(max(signal, 0.0)), min(max(signal, 0.0), 0.99 * variance)
    if steps_s < MIN_DRIFT_STEPS or signal <= 0.0:
        return np.ones_like(load_RT), 0.0, 0.0
    return 1.0 + _smoothed(x_RT, math.exp(-1.0 / steps_s), signal, variance - signal), steps_s, cv


def _smoothed(x_RT: Array, keep: float, signal: float, noise: float) -> Array:
    """The mean of such a course given its noisy values: the precision of an autoregression is tridiagonal."""
    from scipy.linalg import solveh_banded  # which few need, and takes a while to import

    innovation = (1.0 - keep**2) * signal
    precision = np.full((2, x_RT.shape[1]), -keep / innovation)
    precision[1] = (1.0 + keep**2) / innovation + 1.0 / noise
    precision[1, [0, -1]] -= keep**2 / innovation
    return np.asarray(solveh_banded(precision, x_RT.T / noise).T)


def _stalls(matrix: OperationMatrix, operation: Integers, v_NT: Array) -> NDArray[np.bool_]:
    """Durations beyond the tail of a shifted gamma with the bulk's quantiles.

    A large value that the other pass of the same micro-batch shares is data, not a stall.
    """
    relative_NT = v_NT / np.maximum(np.median(v_NT, axis=1, keepdims=True), 1e-12)  # most of its steps may have none
    flagged = np.zeros(v_NT.shape, np.bool_)
    kind_N = matrix.kind_N[operation]
    for kind in np.unique(kind_N):
        mine = kind_N == kind
        flagged[mine] = relative_NT[mine] > stall_threshold(relative_NT[mine])
    if flagged.any():
        forward, backward = _pairs(matrix, operation)
        a, b = relative_NT[forward] - 1.0, relative_NT[backward] - 1.0
        both = (np.minimum(a, b) > 0.5 * np.maximum(a, b)) & (np.minimum(a, b) > 0.0)
        flagged[forward] &= ~both
        flagged[backward] &= ~both
    return flagged


def _fixed_factors(
    matrix: OperationMatrix, operation: Integers, clean_NT: Array, stage_R: Integers, drift_se: float
) -> tuple[Array, Array, Array, bool]:
    """Usual time of each operation, factor of its stage and kind, of ranks; whether stages have peers."""
    kinds, kind = np.unique(matrix.kind_N[operation], return_inverse=True)
    stages, stage = np.unique(matrix.stage_N[operation], return_inverse=True)
    rank, ranks, steps = matrix.rank_N[operation], len(matrix.ranks), clean_NT.shape[1]
    mean_N = clean_NT.mean(axis=1)
    cell = kind * ranks + rank
    sum_KR = np.bincount(cell, mean_N, len(kinds) * ranks).reshape(len(kinds), ranks)
    count_KR = np.bincount(cell, minlength=len(kinds) * ranks).reshape(len(kinds), ranks)
    of_stage = np.searchsorted(stages, stage_R)
    typical_KS, usual_KS = np.ones((len(kinds), len(stages))), np.ones((len(kinds), len(stages)))
    for k in range(len(kinds)):
        for s in range(len(stages)):
            having = (of_stage == s) & (count_KR[k] > 0)
            if having.any():
                peers, usual_KS[k, s] = sum_KR[k, having], np.median(count_KR[k, having])
                typical_s = np.median(peers) if len(peers) > 2 else peers.min()  # who waits there has next to none
                typical_KS[k, s] = max(typical_s, _LEAST * peers.max(), 1e-12) / usual_KS[k, s]
    base_K = np.array([typical_KS[k, np.unique(stage[kind == k])].mean() for k in range(len(kinds))])
    factor_KS = typical_KS / base_K[:, None]
    base_N = base_K[kind] * usual_KS[kind, stage] / count_KR[kind, rank]  # who cuts a kind into more shares it out
    weight_N = base_N * factor_KS[kind, stage]
    rank_R = np.bincount(rank, mean_N, ranks) / np.maximum(np.bincount(rank, weight_N, ranks), 1e-300)
    load_RT = _per_rank(clean_NT, rank, ranks)
    se_R = np.hypot(load_RT.std(axis=1) / load_RT.mean(axis=1) / math.sqrt(steps), drift_se)
    peers_R = np.bincount(of_stage, minlength=len(stages))[of_stage]
    differs_R = np.abs(rank_R - 1.0) > np.maximum(SIGNIFICANT * np.maximum(se_R, np.median(se_R)), MIN_RANK)
    rank_R = np.where(differs_R & (peers_R > 1), rank_R, 1.0)
    return base_N, factor_KS[kind, stage], rank_R, bool((peers_R > 1).all())


def _rank_factors(
    matrix: OperationMatrix, operation: Integers, clean_NT: Array, weight_N: Array, rank_R: Array, drift_se: float
) -> Array:
    """The rank factor of each operation: its rank's, or its kind's on this rank where the kinds do not agree.

    A slow device stretches all kinds alike. Work that only some ranks have, such as an optimizer's shard after a
    collective, is in one kind; a factor common to all kinds would miss it in every operation.
    """
    rank, ranks = matrix.rank_N[operation], len(matrix.ranks)
    _, cell = np.unique(matrix.kind_N[operation] * ranks + rank, return_inverse=True)
    mean_C, weight_C = np.bincount(cell, clean_NT.mean(axis=1)), np.bincount(cell, weight_N)
    rank_C = (np.bincount(cell, rank) / np.bincount(cell)).astype(np.int64)
    per_step_CT = np.zeros((len(mean_C), clean_NT.shape[1]))
    np.add.at(per_step_CT, cell, clean_NT)
    se_s_C = np.hypot(per_step_CT.std(axis=1) / math.sqrt(clean_NT.shape[1]), drift_se * mean_C)
    least_s_C = np.maximum(SIGNIFICANT * se_s_C, MIN_RANK * np.bincount(rank_C, mean_C, ranks)[rank_C])
    usual_s_C = weight_C * rank_R[rank_C]
    is_uneven_R = np.bincount(rank_C, np.abs(mean_C - usual_s_C) > least_s_C, ranks) > 0
    own_C = np.where(np.abs(mean_C - weight_C) > least_s_C, mean_C / np.maximum(weight_C, 1e-300), 1.0)
    return np.asarray(np.where(is_uneven_R[rank_C], own_C, rank_R[rank_C])[cell])


def _pairs(matrix: OperationMatrix, operation: Integers) -> tuple[Integers, Integers]:
    """Positions of forward and backward computes of the same rank, micro-batch and chunk."""
    about = (matrix.rank_N, matrix.micro_batch_N, matrix.chunk_N, matrix.position_N)
    keys = list(zip(*(column[operation].tolist() for column in about), strict=True))
    passes = (np.flatnonzero(matrix.is_op(f"{way}-compute")[operation]) for way in ("forward", "backward"))
    forward, backward = ({keys[i]: i for i in of.tolist()} for of in passes)
    both = sorted(forward.keys() & backward.keys())
    return np.array([forward[k] for k in both], np.int64), np.array([backward[k] for k in both], np.int64)


def _data(matrix: OperationMatrix, operation: Integers, left_NT: Array) -> tuple[Array, float]:
    """What the two passes of a micro-batch have in common, as a factor on both; and how they correlate."""
    data_NT, (forward, backward) = np.ones_like(left_NT), _pairs(matrix, operation)
    if not len(forward):
        return data_NT, np.nan
    a, b = left_NT[forward] - 1.0, left_NT[backward] - 1.0
    spread = a.std() * b.std()
    paired = float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 1e-12 else 0.0
    if paired < MIN_PAIRED:
        return data_NT, paired
    shared = paired * (a / a.std() + b / b.std()) / (1.0 + paired)  # the common factor's best linear predictor
    data_NT[forward] = np.maximum(1.0 + shared * a.std(), 1e-3)
    data_NT[backward] = np.maximum(1.0 + shared * b.std(), 1e-3)
    return data_NT, paired
