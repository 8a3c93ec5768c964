"""Turns the cost of components into named causes: share of lost time, evidence, and advice.

The vocabulary is that of "When Scaling Fails" (section 3.3) and of the straggler study of OSDI 2025 (section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np

from paceenv.core.operation_matrix import Array, Integers, OperationMatrix
from paceenv.core.trace import COMPUTE_OPS
from paceenv.core.wording import duration, name_ranks
from paceenv.diagnosis.attribution import Component, TimeAttribution
from paceenv.diagnosis.compute_attribution import ComputeAttribution
from paceenv.diagnosis.own_overlap import Partner
from paceenv.diagnosis.transfer_attribution import TransferClass

AMPLIFICATION: Final = "synchronisation amplification"
SLOW_RANK: Final = "persistent slow rank"
FAIL_SLOW: Final = "fail-slow episodes"
DATA: Final = "data imbalance"
STAGE: Final = "stage imbalance"
CONTENTION: Final = "communication contention"
TENANT: Final = "co-tenant phase"
INCAST: Final = "incast"
LOCALITY: Final = "GPU/NIC locality"
STALLS: Final = "runtime/control-plane stalls"
CHECKPOINT: Final = "checkpointing"
RESTART: Final = "failures and restarts"
DRIFT: Final = "drift"
PACING: Final = "own pacing"

OF_ONE_RANK: Final = (SLOW_RANK, FAIL_SLOW)
"""What a late rank may have."""
REFERENCE_SKEWNESS: Final = 0.8
"""Smallest skewness of compute under data imbalance: production traces show 1.05, jitter has none."""
MAX_DATA_SKEWNESS: Final = 2.0
"""That of an exponential; a longer tail shows stalls of a host rather than data."""
MIN_SHARE: Final = 0.03
"""Share of lost time; a cause with less is not named."""
MIN_LOST: Final = 0.02
"""Share of a step; a cause that costs less is not named."""
UNEVEN: Final = 0.2
"""Share of a rank's longest excess; with less elsewhere in its step the rank is not slow but has more work there."""
ONE_RANK: Final = 0.95
"""Share of what all ranks vary or stall: one rank with more of it is the only one that does."""
MATTERS: Final = 0.1
"""Share of the slowest rank's excess; a rank with less is not called slow beside it."""
LASTING_S: Final = 10.0
"""Steps that took less together do not show that a rank is slow for long, seconds."""
HIDDEN: Final = 0.5
"""Share of a cause's cost; if removing it would save less, the other causes hide it."""


@dataclass(frozen=True)
class Cause:
    """``share`` is of the lost time, ``lost_s`` seconds of a mean step; ``pacing``: how delays may act on it, or ""."""

    cause: str
    share: float
    evidence: str
    advice: str
    lost_s: float
    pacing: str = ""
    ranks: tuple[int, ...] = ()  # whose cause it is; none where it is of all
    SHOWN: ClassVar = ("cause", "share", "evidence", "advice", "lost_s")


class Said(NamedTuple):
    """What is said of a cause, as in :class:`Cause`."""

    evidence: str
    advice: str
    pacing: str = ""
    ranks: tuple[int, ...] = ()


def name_causes(matrix: OperationMatrix, attribution: TimeAttribution) -> tuple[Cause, ...]:
    """The causes of a job's lost time, the largest first; those that cost next to nothing are left out."""
    parts: dict[str, list[tuple[Component, float]]] = {cause: [] for cause in _WORDS}
    for cause, component, share in _parts(attribution):
        parts[cause].append((component, share))
    costs = {
        cause: sum(share * attribution.cost_s[component] for component, share in of) for cause, of in parts.items()
    }
    lost_s = sum(max(cost, 0.0) for cost in costs.values())
    causes = []
    for name, cost in sorted(costs.items(), key=lambda item: -item[1]):
        if lost_s > 0.0 and cost >= MIN_SHARE * lost_s and cost >= MIN_LOST * attribution.measured_s:
            said = _WORDS[name](matrix, attribution)
            evidence = said.evidence + _saved(attribution, cost, parts[name])
            causes.append(Cause(name, cost / lost_s, evidence, said.advice, cost, said.pacing, said.ranks))
    return tuple(causes)


def _saved(attribution: TimeAttribution, cost_s: float, parts: Sequence[tuple[Component, float]]) -> str:
    """The step time without a cause while all others stay; these may hide that it is gone."""
    saved_s = attribution.saved_s(frozenset(component for component, share in parts if share == 1.0))
    saved_s += sum(share * attribution.saved_s(frozenset({component})) for component, share in parts if share != 1.0)
    # a component is replaced by its median, which may exceed its mean
    left_s = attribution.measured_s - max(saved_s, 0.0)
    said = f"; replayed without it alone, a step takes {duration(left_s)} instead of {duration(attribution.measured_s)}"
    return said + (" (the other causes hide it: fix them first)" if saved_s < HIDDEN * cost_s else "")


_OF_COMPONENT: Final = {
    "stage": STAGE,
    "rank": SLOW_RANK,
    "episode": FAIL_SLOW,
    "drift": DRIFT,
    "data": DATA,
    "stall": STALLS,
    "link": LOCALITY,
    "contention": CONTENTION,
    "tenant": TENANT,
    "timeout": INCAST,
    "hiccup": STALLS,
    "transfer": CONTENTION,
    "gap": STALLS,
    "work": SLOW_RANK,
    "varies": STALLS,
}
_OF_EXTRA: Final = {"restart": RESTART, "pace": PACING, "gc": STALLS}
"""Other work that only some steps have is a checkpoint."""


def _parts(attribution: TimeAttribution) -> Iterator[tuple[str, Component, float]]:
    """The causes that a component goes to, as cause, component and share of the component."""
    for component in attribution.cost_s:
        if component.name == "rest":
            variance_R = attribution.compute.rest_cv_R**2
            # one rank alone is late now and then: who it is, and why, the arrivals say
            if variance_R.max() > ONE_RANK * variance_R.sum():
                continue
            skewed = _skewed_share(attribution)
            yield DATA if attribution.compute.skewness <= MAX_DATA_SKEWNESS else STALLS, component, skewed
            yield AMPLIFICATION, component, 1.0 - skewed
        elif component.name == "extra":
            yield _OF_EXTRA.get(component.operation, CHECKPOINT), component, 1.0
        else:
            yield _OF_COMPONENT[component.name], component, 1.0


def _skewed_share(attribution: TimeAttribution) -> float:
    """The share of memoryless variation that is data: the part of its variance that REFERENCE_SKEWNESS explains.

    The third moments of independent parts add up, and jitter has none. Where forward and backward pass can be compared,
    their correlation has already separated data.
    """
    if np.isfinite(attribution.compute.paired):
        return 0.0
    return float(min(attribution.compute.skewness / REFERENCE_SKEWNESS, 1.0) ** (2.0 / 3.0))


def _varies(compute: ComputeAttribution) -> float:
    return float(np.sqrt((compute.rest_cv_R**2).mean()))


def _numbers(matrix: OperationMatrix, at: Integers) -> tuple[int, ...]:
    """The ranks at these places."""
    return tuple(matrix.ranks[r] for r in at.tolist())


def _slow(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    c = attribution.compute
    usual = max(float(c.rank_R.min()), 1.0)  # of two ranks each may be the slower one in a place of its own
    at = np.flatnonzero(c.rank_R > usual)
    at = at[np.argsort(-c.rank_R[at], kind="stable")]
    at = at[c.rank_R[at] - 1.0 > MATTERS * (c.rank_R[at[:1]] - 1.0)]
    work = {one.operation: cost_s for one, cost_s in attribution.cost_s.items() if one.name == "work"}
    if max(work.values(), default=0.0) > attribution.of("rank"):
        op = max(work, key=lambda name: work[name])
        operations = np.flatnonzero(matrix.is_op(op))
        own_R = np.bincount(matrix.rank_N[operations], matrix.duration_NT[operations].mean(axis=1), len(matrix.ranks))
        most = _numbers(matrix, np.flatnonzero(own_R > 0.5 * own_R.max()))
        most_s, usual_s = duration(own_R.max()), duration(np.median(own_R))
        evidence = f"{op} takes {name_ranks(most)} {most_s} a step, the others {usual_s}"
        return Said(evidence, f"give the ranks equal work: spread {op}, or overlap it", ranks=most)
    excess_s = ((c.factors["rank"] - 1.0) * c.base_s * c.factors["stage"]).mean(axis=1)
    worst = int(at[0]) if len(at) else int(np.bincount(matrix.rank_N[c.operation], np.maximum(excess_s, 0.0)).argmax())
    if (uneven := _uneven_work(matrix, excess_s, attribution, worst)) is not None:
        return uneven
    if not len(at):
        evidence = "ranks take longer than others, each in places of its own"
        return Said(evidence, "give all ranks equal hardware and work")
    takes = "computes" if set(matrix.ops) & set(COMPUTE_OPS[1:]) else "takes between collectives"
    longer = f"{c.rank_R[worst] / usual:.2f} times as long as its peers"
    evidence = f"rank {matrix.ranks[worst]} {takes} {longer}, throughout"
    if len(at) > 1:
        slower = name_ranks(_numbers(matrix, at))
        evidence += f"; {len(at)} of {len(matrix.ranks)} ranks are slower than their peers ({slower})"
    # ranks far above the others are broken; many ranks a little above them are a mixed fleet
    clear = _numbers(matrix, at[c.rank_R[at] - 1.0 > 0.5 * (c.rank_R[worst] - 1.0)])
    if len(clear) > max(1, len(matrix.ranks) // 8):
        return Said(evidence, "ranks are unequal: give slower ones less work, or pair like with like")
    it, them = ("it has", "it") if len(clear) == 1 else ("they have", "them")
    find = f"find out why {name_ranks(clear)} took longer: clocks, the host, the data loader, or work that only {it}"
    recorded_s = float(matrix.step_s_T.sum())
    then = f"replace {them} if nothing else is found"
    if recorded_s < LASTING_S:
        then = f"record longer to see whether it lasts, as all steps together took {duration(recorded_s)}"
    return Said(evidence, f"{find}; {then}", ranks=clear)


def _uneven_work(matrix: OperationMatrix, excess_s: Array, attribution: TimeAttribution, worst: int) -> Said | None:
    """Where a rank's excess lies in one place of the step and its other compute is like its peers': no slow device."""
    c = attribution.compute
    mine = np.flatnonzero(matrix.rank_N[c.operation] == worst)
    usual_s = (c.base_s * c.factors["stage"]).mean(axis=1)
    at = int(mine[np.argmax(excess_s[mine])])
    elsewhere = mine[mine != at]
    if excess_s[elsewhere].sum() > UNEVEN * excess_s[at] or usual_s[elsewhere].sum() < usual_s[at]:
        return None
    peers = np.flatnonzero(matrix.kind_N[c.operation] == matrix.kind_N[c.operation[at]])
    taken_s = matrix.duration_NT[c.operation[peers]].mean(axis=1)
    has_excess = excess_s[peers] > 0.5 * excess_s[at]
    having, others_s = _numbers(matrix, matrix.rank_N[c.operation[peers[has_excess]]]), taken_s[~has_excess]
    place, ranks = _place(matrix, int(c.operation[at])), name_ranks(having)
    others = f", the others {duration(np.median(others_s))}" if len(others_s) else ""
    what = matrix.ops[matrix.op_N[c.operation[at]]]
    what = "what comes" if what == COMPUTE_OPS[0] else what
    evidence = f"{what} {place} takes {ranks} {duration(taken_s.max())} a step"
    advice = (
        f"find out what {ranks} {'does' if len(having) == 1 else 'do'} {place}: wait for a data loader or another host "
        "task, or more than equal work; spread it, or overlap it"
    )
    return Said(f"{evidence}{others}; elsewhere these take as long as their peers", advice, ranks=having)


def _place(matrix: OperationMatrix, operation: int) -> str:
    """Where in its rank's step an operation is, by the collectives around it."""
    mine = np.flatnonzero((matrix.rank_N == matrix.rank_N[operation]) & matrix.is_collective_N & matrix.usual_N)
    before, after = mine[mine < operation], mine[mine > operation]

    def name(n: int) -> str:
        like = mine[matrix.op_N[mine] == matrix.op_N[n]]
        return f"{matrix.ops[matrix.op_N[n]]}{f' {(like <= n).sum()}' if len(like) > 1 else ''}"

    if not len(before):
        return f"before {name(int(after[0]))}" if len(after) else "of a step"
    last = name(int(before[-1]))
    return f"between {last} and {name(int(after[0]))}" if len(after) else f"after {last}"


def _fail_slow(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    on = attribution.compute.episode_RT
    at = np.flatnonzero(on.any(axis=1))
    share = float(on[at].mean()) if len(at) else 0.0
    verb, its = ("moves", "its") if len(at) == 1 else ("move", "their")
    who, slow = name_ranks(_numbers(matrix, at)), f"slow in {share:.0%} of {its} steps"
    evidence = f"{who} {verb} between two speeds for many steps each: {slow}"
    return Said(evidence, "look at clocks, thermals and neighbours of these ranks when it begins")


def _data(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    c = attribution.compute
    if np.isfinite(c.paired):
        why = f"forward and backward pass of a micro-batch are long together (correlation {c.paired:.2f})"
    else:
        why = f"compute varies by {_varies(c):.1%} with a long upper tail (skewness {c.skewness:.2f})"
    evidence = f"{why}, on another rank in every step, at random"
    advice = "balance sequence lengths across ranks and micro-batches (sort or pack by length), or spread long ones"
    known = np.isfinite(c.paired)
    return Said(evidence, advice if known else f"{advice}; with equal lengths, look at other work on the hosts")


def _amplification(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    c = attribution.compute
    evidence = (
        f"compute varies by {_varies(c):.1%} on every rank, independently and at random; a step waits for the "
        f"slowest of {len(matrix.ranks)}"
    )
    advice = (
        "reduce the jitter itself (system services, clocks, garbage collection), or wait less often (local SGD, "
        "overlap, fewer and larger groups); delaying a rank never lowers a maximum"
    )
    return Said(evidence, advice)


def _stage(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    c = attribution.compute
    stages = np.unique(matrix.stage_N[c.operation])
    load_NT = c.base_s * c.factors["stage"]
    load = np.array([float(load_NT[matrix.stage_N[c.operation] == s].mean()) for s in stages])
    worst = int(np.argmax(load))
    factor = load[worst] / np.median(np.delete(load, worst))
    evidence = f"stage {stages[worst]} computes {factor:.2f} times as long as the others"
    if not c.twins:
        evidence += "; with one rank a stage, a slow rank would look the same"
    return Said(evidence, f"move layers away from stage {stages[worst]}, or split its output layer")


def _contention(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    classes = attribution.transfers.classes
    if not classes or attribution.of("contention") < attribution.of("transfer"):
        advice = (
            "look for other work on the hosts and, where ranks are on several, for other traffic on their links; "
            "pacing cannot anticipate it"
        )
        return Said("transfers take longer now and then, at random", advice)
    worst = max(classes, key=lambda one: one.contention)
    if worst.partner is not None:
        return _own_partner(worst, worst.partner)
    evidence = (
        f"{worst.groups} groups run {worst.op} side by side; each takes {worst.contention:.2f} times as long as "
        "alone, as a shared uplink under their own starts explains"
    )
    pacing = "pacing (slack) of the groups that have time to spare"
    return Said(evidence, "more uplink, or groups that share leaves", pacing)


def _own_partner(slowed: TransferClass, partner: Partner) -> Said:
    """A reduction in the background that slows what the ranks stand still for."""
    times = slowed.contention
    how = (
        f"takes {times:.2f} times as long as without it"
        if partner.is_measured
        else f"never runs without it; with equal shares of a link it takes {times:.2f} times as long as alone"
    )
    evidence = (
        f"{slowed.op} runs beside the job's own {partner.op} on another communicator for {partner.share:.0%} of its "
        f"time and {how}"
    )
    advice = (
        f"hold the {partner.op} back while the {slowed.op} runs (rule defer), or give the {slowed.op}'s communicator "
        "priority"
    )
    return Said(evidence, advice, "pacing (defer)")


def _tenant(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    worst = max(attribution.transfers.classes, key=lambda one: one.inflated)
    evidence = (
        f"{worst.op} takes {worst.inflated:.0%} longer than its best on average, and comes and goes with a memory (its "
        f"last steps predict it, correlation {worst.predictability:.2f}) that the job's own ranks do not explain"
    )
    advice = "look for another job's transfers on the same links: move one of the jobs, or shift the phase"
    return Said(evidence, advice, "pacing (phase_shift) where the other job's period is close to ours")


def _incast(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    worst = max(attribution.transfers.classes, key=lambda one: one.timeout_s)
    more = f"{worst.timeout_s * 1e3:.0f} ms longer than the others"
    evidence = f"{worst.collapsed:.0%} of the {worst.op}s take {more}, as after a timeout"
    if worst.op == "all_to_all":
        return Said(evidence, "deeper buffers or lossless links; staggering costs in an all_to_all")
    return Said(evidence, "deeper buffers, lossless links, a tree instead of a gather", "pacing (stagger)")


def _locality(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    worst = max(attribution.transfers.classes, key=lambda one: float(one.link_K.max()))
    k = int(np.argmax(worst.link_K))
    evidence = (
        f"{worst.op} of the group of {name_ranks(worst.ranks_K[k])} always takes {worst.link_K[k]:.2f} times as long "
        "as that of the others, once all its members are there"
    )
    return Said(evidence, "check which NIC, socket and PCIe switch these ranks use, and the cable")


def _stalls(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    c, t = attribution.compute, attribution.transfers
    parts = {name: attribution.of(name) for name in ("stall", "hiccup", "gap", "rest")}
    parts["rest"] *= _skewed_share(attribution) * (c.skewness > MAX_DATA_SKEWNESS)
    most = max(parts, key=lambda name: parts[name])
    if most == "gap":
        share = parts["gap"] / attribution.measured_s
        evidence = f"{share:.1%} of the step lies between operations, where no dependency explains it"
    elif most == "hiccup":
        hiccup_s = t.seconds["hiccup"][t.seconds["hiccup"] > 0.0]
        some = f"some {duration(float(np.median(hiccup_s)))} longer than their like"
        evidence = f"{len(hiccup_s)} collectives take {some}, now one, now another"
    elif most == "rest":
        evidence = f"compute varies by {_varies(c):.1%} with a very long tail (skewness {c.skewness:.1f}), at random"
    else:
        stall_NT = c.seconds["stall"]
        n, step = divmod(int(stall_NT.argmax()), stall_NT.shape[1])
        longest_s = float(stall_NT[n, step])
        if longest_s > 0.5 * stall_NT.sum():
            place = f"rank {matrix.ranks[matrix.rank_N[c.operation[n]]]} in iteration {matrix.iteration_T[step]}"
            evidence = f"one compute operation, of {place}, takes {duration(longest_s)} longer than its like"
        else:
            stall_s = stall_NT[stall_NT > 0.0]
            mean_s = float(stall_s.mean()) if len(stall_s) else 0.0
            longer = f"{duration(mean_s)} longer than their like (at most {duration(longest_s)})"
            stall_s_R = np.bincount(matrix.rank_N[c.operation], stall_NT.sum(axis=1), len(matrix.ranks))
            rank = matrix.ranks[int(stall_s_R.argmax())]
            alone = stall_s_R.max() > ONE_RANK * stall_s_R.sum()
            where = f"nearly all on rank {rank}" if alone else "on any rank"
            evidence = f"{(stall_NT > 0.0).mean():.2%} of compute operations take {longer}, {where}"
            if alone:
                look = f"find out what rank {rank} does then: saving, loading, garbage collection, services of its host"
                return Said(evidence, look, ranks=(rank,))
    advice = (
        "look at garbage collection, allocation, data loading and services of the host; "
        "run collections on all ranks in the same step"
    )
    return Said(evidence, advice)


def _checkpoint(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    written = {
        one.operation: steps
        for one, steps in attribution.present.items()
        if one.name == "extra" and one.operation not in _OF_EXTRA
    }
    names, steps = " and ".join(sorted(written)), max(written.values(), default=0)
    if names == COMPUTE_OPS[0]:
        evidence = f"work that only {steps} of {matrix.steps} steps have: saving, evaluation or logging"
        return Said(evidence, "do it less often, or beside the step")
    advice = "write checkpoints asynchronously, or less often (Young's interval)"
    advice = advice if "checkpoint" in names else f"less often: {names}"
    return Said(f"{names} in {steps} of {matrix.steps} steps", advice)


def _restart(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    steps = attribution.present.get(Component("extra", "restart"), 0)
    return Said(f"{steps} restarts in {matrix.steps} steps", "find the failing node; restart warm")


def _drift(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    c = attribution.compute
    spread = float(np.std(c.factors["drift"]))
    evidence = (
        f"ranks' compute wanders by {spread:.1%}, each rank by itself, with a memory of some {c.drift_steps:.0f} steps"
    )
    return Said(evidence, "look at clocks, temperature and power of the ranks that wander")


def _own_pacing(matrix: OperationMatrix, attribution: TimeAttribution) -> Said:
    advice = "compare with pacing off (canary): this pacing costs more than it may gain"
    return Said("ranks hold themselves back", advice)


_WORDS: Final[dict[str, Callable[[OperationMatrix, TimeAttribution], Said]]] = {
    AMPLIFICATION: _amplification,
    SLOW_RANK: _slow,
    FAIL_SLOW: _fail_slow,
    DATA: _data,
    STAGE: _stage,
    CONTENTION: _contention,
    TENANT: _tenant,
    INCAST: _incast,
    LOCALITY: _locality,
    STALLS: _stalls,
    CHECKPOINT: _checkpoint,
    RESTART: _restart,
    DRIFT: _drift,
    PACING: _own_pacing,
}
