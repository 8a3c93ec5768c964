"""A job's step in the words of section ``program`` of a cluster config.

Also which process groups would have more members in a larger job: those that sum gradients, told by what runs on a
communicator. Gradients are reduced in the background up to the end of the step, or in one piece without compute in
between. Exchanges among experts and messages between stages keep their groups, and so do all-reduces that block again
and again between compute, as those of activations in tensor parallelism do.

Axes: T steps, R ranks, K transfers of a step, L = K + 1 segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.calibration.cluster_builder import RankCompute
from paceenv.calibration.noise_fit import MIN_STEPS
from paceenv.calibration.parameters import Parameter, exact, not_identifiable
from paceenv.calibration.program_stamps import ProgramStamps
from paceenv.calibration.step_order import StepOrder
from paceenv.sim.cluster.program.step_program import WORLD, Communicator

NEGLIGIBLE: Final = 1e-5
"""Share of a step; shorter compute is left out."""
ALIKE: Final = 0.02
"""Computing times of two phases, or of two ranks, that differ by less may be one."""
DIFFERS: Final = 0.005
"""Share of a step by which a rank's own phase must differ for it to be more than noise."""
LONG: Final = 0.01
"""Share of a step that a phase must take for its variation to count."""
SURE: Final = 4.0
"""Standard errors within which two means do not differ."""

KEY: Final = "program.communicators"
SMALL: Final = 0.01
"""Share of the largest payload of all communicators; smaller ones, such as a norm or a loss, say nothing."""
BETWEEN: Final = 0.05
"""Share of a step's compute that lies between activations of a model-parallel group at least, and between gradients in
one piece at most."""
SETTLES: Final = "--base with a typed program settles it, in which such groups have grows: true, the others a size"

Array = NDArray[np.float64]


def step_phases(stamps: ProgramStamps, order: StepOrder) -> tuple[list[dict[str, Any]], RankCompute]:
    """The phases of a job's step, and the ranks' compute that they describe.

    Phases name ranks that differ by more than a factor; lasting differences are noise otherwise.
    """
    mean_RL, se_RL = _compute(stamps, order.compute_TRL)
    total_TR = np.nansum(order.compute_TRL, axis=2)
    kinds_T = stamps.full_T
    ratio_TR = np.ones_like(total_TR)
    for kind in (True, False):
        if (kinds_T == kind).any():
            ratio_TR[kinds_T == kind] = total_TR[kinds_T == kind] / total_TR[kinds_T == kind].mean(axis=0)
    by_rank = _by_rank(stamps, mean_RL, se_RL)
    if not by_rank:  # a rank's own mean is a factor, which noise has
        ratio_TR = ratio_TR * (total_TR.mean(axis=0) / total_TR.mean())
    phases, relative_R = list(_phases(stamps, order, mean_RL, se_RL, by_rank=by_rank)), list[Array]()
    for full_TL in np.moveaxis(order.compute_TRL[stamps.full_T], 1, 0):
        mean_L = full_TL.mean(axis=0)
        used = np.nan_to_num(mean_L) > LONG * float(stamps.step_T.mean())
        relative_R.append(full_TL[:, used] / mean_L[used])
    return phases, RankCompute(ratio_TR, by_rank, relative_R)


def _compute(stamps: ProgramStamps, compute_TRL: Array) -> tuple[Array, Array]:
    """Mean compute of each rank and segment with its standard error, seconds; not a number where a rank lacks it.

    Where steps lack transfers, the segments up to the next transfer that they have are scaled to their mean over all
    steps.
    """
    full_T, steps = stamps.full_T, len(stamps.step_T)
    full = compute_TRL[full_T]
    mean_RL = full.mean(axis=0)
    spread_RL = full.std(axis=0, ddof=1) if full_T.sum() > 1 else ALIKE * mean_RL
    se_RL = spread_RL / np.sqrt(full_T.sum()) * (steps >= MIN_STEPS)  # no noise is fitted to fewer steps
    if full_T.all():
        return mean_RL, se_RL
    always_L = np.array([one.every == 1 for one in stamps.transfers] + [True])
    for r in range(stamps.ranks):
        run = list[int]()
        for label in np.flatnonzero(np.isfinite(mean_RL[r])).tolist():
            run.append(label)
            if always_L[label]:
                wanted_s = float(np.nansum(compute_TRL[:, r][:, run])) / steps
                mean_RL[r, run] *= wanted_s / max(float(mean_RL[r, run].sum()), 1e-300)
                run = []
    return mean_RL, se_RL


def _by_rank(stamps: ProgramStamps, mean_RL: Array, se_RL: Array) -> bool:
    """Whether ranks differ by more than a factor of their own: other transfers, or compute in other places."""
    has_RL = np.isfinite(mean_RL)
    if (has_RL != has_RL[0]).any():
        return True
    factor_R1 = (mean_RL.sum(axis=1) / max(mean_RL.sum(axis=1).mean(), 1e-300))[:, None]
    own_RL = mean_RL / np.maximum(factor_R1, 1e-300)
    apart_RL = np.abs(own_RL - own_RL.mean(axis=0))
    return bool((apart_RL > np.maximum(DIFFERS * float(stamps.step_T.mean()), SURE * se_RL)).any())


def _phases(
    stamps: ProgramStamps, order: StepOrder, mean_RL: Array, se_RL: Array, *, by_rank: bool
) -> Iterator[dict[str, Any]]:
    K, step_s = len(stamps.transfers), float(stamps.step_T.mean())
    at_K = zip(order.wait_K.tolist(), order.before_K.tolist(), strict=True)
    awaited = [k for k, at in enumerate(at_K) if order.background_K[k] and at < (K, 1.0)]
    names = {k: f"t{number}" for number, k in enumerate(awaited, start=1)}
    for label in range(K + 1):
        ranks = np.flatnonzero(np.isfinite(mean_RL[:, label]))
        waits = sorted((float(order.before_K[k]), k) for k in names if order.wait_K[k] == label)
        done = 0.0
        for share, k in [*waits, (1.0, -1)]:
            if share > done:
                for some in _alike(mean_RL[:, label], se_RL[:, label], ranks, step_s) if by_rank else [ranks]:
                    seconds = (share - done) * float(mean_RL[some, label].mean())
                    named = {} if len(some) == stamps.ranks else {"ranks": some.tolist()}
                    if seconds > NEGLIGIBLE * step_s:
                        yield {"compute": {"seconds": float(f"{seconds:.6g}"), **named}}
                done = share
            if k >= 0:
                yield {"wait": names[k]}
        if label < K:
            one = stamps.transfers[label]
            given: dict[str, Any] = {"bytes": float(f"{one.payload_bytes:.12g}"), "communicator": one.communicator}
            given |= {"name": names[label]} if label in names else {}
            given |= {"background": True} if order.background_K[label] else {}
            given |= {"can_wait": True} if order.can_wait_K[label] else {}
            given |= {"every": one.every} if one.every > 1 else {}
            given |= {"ranks": one.ranks} if len(one.ranks) < stamps.ranks else {}
            yield {one.op: given}


def _alike(mean_R: Array, se_R: Array, ranks: NDArray[np.int64], step_s: float) -> list[NDArray[np.int64]]:
    """Ranks that compute equally long in a segment, together."""
    order = ranks[np.argsort(mean_R[ranks], kind="stable")]
    value, doubt = mean_R[order], SURE * np.hypot(se_R[order][1:], se_R[order][:-1])
    apart = np.diff(value) > np.maximum(np.maximum(doubt, ALIKE * value[1:]), 0.2 * DIFFERS * step_s)
    return [np.sort(part) for part in np.split(order, np.flatnonzero(apart) + 1)]


class _Kind(NamedTuple):
    grows: bool | None
    """None: not known."""
    why: str


def group_growth(stamps: ProgramStamps, order: StepOrder) -> tuple[ProgramStamps, Parameter]:
    """The stamps with ``grows`` in the communicators that grow with a job, and what is known of them in words."""
    used = list(dict.fromkeys(one.communicator for one in stamps.transfers))
    kinds = {name: _kind(stamps, order, name) for name in used}
    every = {WORLD: Communicator()} | dict(stamps.communicators)
    blocks = {name: (every[name].size or stamps.ranks) * every[name].stride for name in used}
    largest = max((blocks[name] for name, kind in kinds.items() if kind.grows), default=0)
    for name, kind in kinds.items():  # of shards within a node and sums between nodes, the latter grow
        if kind.grows and blocks[name] < largest:
            kinds[name] = _Kind(False, "shards of replicas")
    communicators, transfers, label = dict(stamps.communicators), stamps.transfers, f"groups-of-{stamps.ranks}"
    for name, kind in kinds.items():
        if kind.grows and every[name].size is not None:
            communicators[name] = every[name].model_copy(update={"grows": True})
        elif kind.grows is False and every[name].size is None and every[name].pairs is None:
            communicators[label if name == WORLD else name] = Communicator(size=stamps.ranks)
    if WORLD in kinds and kinds[WORLD].grows is False:  # groups of all ranks that keep their size have a name
        transfers = tuple(one._replace(communicator=label) if one.communicator == WORLD else one for one in transfers)
    stamps = replace(stamps, communicators=communicators, transfers=transfers)
    unknown = [f"{name} ({kind.why})" for name, kind in kinds.items() if kind.grows is None]
    if unknown or not largest:
        why = f"not known which groups have more members in a larger job: {', '.join(unknown)}"
        if not unknown:
            why = "no transfer sums gradients between replicas, so what a larger job adds is not in the trace"
        return stamps, not_identifiable(KEY, None, why, SETTLES)
    grow = [name for name, kind in kinds.items() if kind.grows]
    keep = [f"{name} ({kind.why})" for name, kind in kinds.items() if not kind.grows]
    said = f"with more ranks, groups of {', '.join(grow)} have more members" + (
        f"; the same number: {', '.join(keep)}" if keep else ""
    )
    return stamps, exact(KEY, len(used), said)


def _kind(stamps: ProgramStamps, order: StepOrder, name: str) -> _Kind:
    """Whether the groups of a communicator grow, and why."""
    mine = [k for k, one in enumerate(stamps.transfers) if one.communicator == name]
    largest = max(one.payload_bytes for one in stamps.transfers)
    big = [k for k in mine if stamps.transfers[k].payload_bytes > SMALL * largest]
    ops, own = ({stamps.transfers[k].op for k in some} for some in (mine, big))
    reduces = bool(order.can_wait_K[mine].any())
    if {"all_to_all", "send"} & ops:
        return _Kind(None, "both exchanges and gradients") if reduces else _Kind(False, "exchanges or messages")
    if reduces:
        return _Kind(True, "gradients in the background")
    if not own:
        return _Kind(name == WORLD, "small")
    if own <= {"all_reduce", "broadcast"} and not order.background_K[big].any():
        total_L = np.nansum(order.compute_TRL, axis=(0, 1))
        between = float(total_L[big[0] + 1 : big[-1] + 1].sum() / max(total_L.sum(), 1e-300))
        if between < BETWEEN and "all_reduce" in own:
            return _Kind(True, "gradients in one piece")
        if between >= BETWEEN and len(big) > 1:
            return _Kind(False, "all-reduces that block between compute")
    return _Kind(None, f"{', '.join(sorted(own))}: of gradients or of activations")
