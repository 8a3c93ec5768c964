"""The engine's data layout: the parameters of a simulated job (``JOB``, ``TENANT``), its state, and the arguments.

``paceenv.sim.cluster`` fills the parameter records; the kernel reads them and owns the state. Functions of the kernel
take arrays in a few groups (:class:`Tables`, :class:`State`, :class:`View`, :class:`Scratch`, :class:`Recording`).
Axes: E environments (jobs side by side), R ranks, G process groups, K tenants. Everything is float64 unless named
otherwise; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceenv.core.pacing import MECHANISMS
from paceenv.core.timing import RANK_FIELDS

JOB = np.dtype(
    [
        ("compute_s", "f8"),
        ("jitter_cv", "f8"),
        ("common_cv", "f8"),
        ("persistent_cv", "f8"),
        ("slow_ranks", "i8"),
        ("slow_factor", "f8"),
        ("imbalance_cv", "f8"),
        ("imbalance_skew", "f8"),
        ("imbalance_table", "i8"),
        ("fail_slow_share", "f8"),
        ("fail_slow_mean_iterations", "f8"),
        ("fail_slow_factor", "f8"),
        ("drift_cv", "f8"),
        ("drift_iterations", "f8"),
        ("stall_rate", "f8"),
        ("stall_mean_s", "f8"),
        ("late_wake_s", "f8"),
        ("stamp_noise_s", "f8"),
        ("missing_share", "f8"),
        ("transfer_alone_s", "f8"),
        ("uplink_work_s", "f8"),
        ("latency_s", "f8"),
        ("transfer_cv", "f8"),
        ("overlap_share", "f8"),
        ("tail_s", "f8"),
        ("has_barrier", "?"),
        ("barrier_s", "f8"),
        ("staleness", "i8"),
        ("incast_kind", "i8"),
        ("incast_flow_s", "f8"),
        ("incast_fit", "f8"),
        ("incast_timeout_s", "f8"),
        ("incast_buffered_s", "f8"),
        ("post_work_s", "f8"),
        ("post_work_groups", "i8"),
        ("post_work_share", "f8"),
        ("post_work_mean_iterations", "f8"),
        ("post_work_episode_s", "f8"),
        ("post_work_spread", "f8"),
        ("compute_w", "f8"),
        ("wait_w", "f8"),
        ("delay_w", "f8"),
        ("ranks_per_node", "i8"),
        ("heat_slowdown", "f8"),
        ("heat_iterations", "f8"),
        ("checkpoint_iterations", "i8"),
        ("checkpoint_s", "f8"),
        ("failure_per_s", "f8"),
        ("failure_heat", "f8"),
        ("restart_s", "f8"),
        ("warmup_iterations", "i8"),
        ("warmup_factor", "f8"),
        ("ideal_step_s", "f8"),
        ("length_cv", "f8"),
    ],
    align=True,
)
"""Parameters of one job. ``transfer_alone_s`` is the time of a group's collective on its own links. ``uplink_work_s``
is the part of it that occupies the shared uplink, in seconds of the whole uplink. A random factor with coefficient of
variation ``transfer_cv``, drawn for each group and iteration, stretches the time of the fluid. ``imbalance_table``
indexes the quantile tables, one for each ``imbalance_skew`` of a batch. ``ideal_step_s`` is the step without noise and
other jobs: the reference of reward and reports.

A delay lasts longer than decided by an exponential time of mean ``late_wake_s``. What a rank measures has a normal
error of ``stamp_noise_s``. A rank cannot measure a step with probability ``missing_share``.

``overlap_share`` is the share of a rank's compute that is still to come when its first gradients are ready and the
collective may start. ``tail_s`` is the time of the last gradients alone, latency included, always after the compute.
``staleness`` is by how many steps a rank may run ahead of the slowest (0: not at all; only without a barrier).

``incast_kind`` (``NO_INCAST``, ``GATHER``: every member sends to its group's first, ``ALL_TO_ALL``) replaces the fluid
uplink. A receiver's port takes ``incast_flow_s`` for one sender's message. Its buffer holds the opening windows of
``incast_fit`` senders. A sender that loses the end of its window waits ``incast_timeout_s``. It
leaves a gather when what is left of its message, ``incast_buffered_s`` of the port's time, fits its send buffer.

Where the step is a program, its compute times are shares of ``compute_s``, and the length of a micro-batch varies by
``length_cv``.

Powers are of one rank, in watts, while it computes, waits or communicates, and is delayed. A node of ``ranks_per_node``
ranks warms towards its mean power relative to ``compute_w`` within ``heat_iterations`` and then computes ``1 +
heat_slowdown * heat`` times as long. Every ``checkpoint_iterations`` (0: never) the step takes ``checkpoint_s`` longer.
The job fails at a rate of ``failure_per_s * (1 + failure_heat * mean heat)`` while it runs, per second. It then pays
``restart_s``, loses its iterations since the last checkpoint, and computes ``warmup_factor`` times as long for
``warmup_iterations``."""

NO_INCAST, GATHER, ALL_TO_ALL = 0, 1, 2
"""Values of ``incast_kind``."""
MAX_STALENESS = 8

TENANT = np.dtype(
    [
        ("compute_s", "f8"),
        ("uplink_work_s", "f8"),
        ("rate_cap", "f8"),
        ("weight", "f8"),
        ("jitter_cv", "f8"),
        ("ranks", "f8"),
        ("bursty", "?"),
        ("pause_rate", "f8"),
        ("pause_periods", "f8"),
        ("late_share", "f8"),
    ],
    align=True,
)
"""A co-tenant on the uplink: computes, then transfers ``uplink_work_s`` at no more than ``rate_cap`` of the uplink,
then computes again, as long as the slowest of its ``ranks``. ``weight`` is its share in a tie relative to one of our
groups; weight 0 means absent. Of us and a tenant, whichever begins while the other transfers has ``late_share`` of its
weight beside the other's until one is through. With probability ``pause_rate`` it stands still after a transfer,
uniformly for up to ``pause_periods`` of its own periods, so that its phase is new: a checkpoint, or another job in its
place. A ``bursty`` tenant draws lengths of gaps and transfers exponentially, as background traffic does, and does not
pause."""

CLOCK = np.dtype(
    [
        ("key", "u8"),
        ("iteration", "i8"),
        ("link_s", "f8"),
        ("delay_s", "f8"),
        ("stall_next", "i8"),
        ("stall_count", "i8"),
        ("fail_slow_next", "i8"),
        ("fail_slow_count", "i8"),
        ("recovery_next", "i8"),
        ("recovery_count", "i8"),
        ("post_work_next", "i8"),
        ("post_work_count", "i8"),
        ("energy_j", "f8"),
        ("time_s", "f8"),
        ("failures", "i8"),
        ("kept", "i8"),
        ("saved", "i8"),
        ("warm_at", "i8"),
        ("hazard_left", "f8"),
        ("steps_s", "f8", (MAX_STALENESS,)),
    ],
    align=True,
)
"""Per-environment state. Times are relative to the end of the last step, so precision never decays.

``*_next`` is the flattened index ``iteration * R + rank`` (or group) of the next rare event; ``*_count`` is how many
were drawn. ``delay_s`` is the mean delay of all ranks over the last run. ``energy_j`` and ``time_s`` are spent since
the start of the episode. ``kept`` are the iterations that no failure has undone, ``saved`` those in the last
checkpoint. A restarted job is warm again at iteration ``warm_at``. ``hazard_left`` is the rest of an exponential
threshold until the next failure. ``steps_s`` are the last steps, for bounded staleness."""

# noise[N, R], float32
FACTOR, DRIFT_X = 0, 1
NOISE_FIELDS = 2
"""``FACTOR`` is a rank's persistent factor, negative while it is in a fail-slow episode."""
# group[N, G]
POST_WORK_UNTIL, POST_WORK_NOW_S, FIXED_POST_WORK_S = 0, 1, 2
GROUP_FIELDS = 3
# heat[N, node], float32; room for as many nodes as ranks
HEAT, COMPUTED_S = 0, 1
HEAT_FIELDS = 2
# tenant[N, K]
NEXT_S, LEFT_S, CYCLES, WEIGHT = 0, 1, 2, 3
TENANT_FIELDS = 4


class Tables(NamedTuple):
    """What a batch is given and the engine only reads."""

    jobs: Any
    """``(E,)`` of ``JOB``: the parameters of each job."""
    tenants_EK: Any
    """``(E, K)`` of ``TENANT``: the co-tenants of each job."""
    normal: NDArray[np.float64]
    """``(TABLE_SIZE,)``: quantile table of the standard normal (``draws.normal_table``)."""
    imbalance: NDArray[np.float64]
    """``(skewnesses, TABLE_SIZE)``: quantile tables of data imbalance; a job's ``imbalance_table`` is its row."""
    limits: NDArray[np.float64]
    """``(4,)``: the limits of every delay, as ``paceenv.core.limits.Limits.numbers``."""


class State(NamedTuple):
    """What a batch remembers from one iteration to the next."""

    clocks: Any
    """``(E,)`` of ``CLOCK``."""
    noise_ENR: NDArray[np.float32]
    """``(E, NOISE_FIELDS, R)``: lasting factors of each rank, no unit."""
    heat_EHN: NDArray[np.float32]
    """``(E, HEAT_FIELDS, R)``: heat (no unit) and compute time (seconds) of each node; 0 where heat changes nothing."""
    start_ER: NDArray[np.float32]
    """``(E, R)``: when each rank started its step, seconds, at most 0; only with staleness."""
    group_ENG: NDArray[np.float64]
    """``(E, GROUP_FIELDS, G)``: post-collective work of each group; seconds and iteration numbers."""
    tenant_ENK: NDArray[np.float64]
    """``(E, TENANT_FIELDS, K)``: where each tenant is in its cycle; seconds and counts."""
    rank_EFR: NDArray[np.float32]
    """``(E, timing.RANK_FIELDS, R or more)``: the estimator of each rank (``paceenv.core.timing``); seconds."""
    tick_EK: NDArray[np.float64]
    """``(E, timing.TICK_FIELDS)``: the estimator's part that all ranks of a job share."""


class View(NamedTuple):
    """One job of a batch: its row of every field of :class:`Tables` and :class:`State`, which it writes to."""

    job: Any
    clock: Any
    tenants: Any
    normal: NDArray[np.float64]
    imbalance: NDArray[np.float64]
    noise: NDArray[np.float32]
    heat: NDArray[np.float32]
    start_R: NDArray[np.float32]
    group: NDArray[np.float64]
    tenant: NDArray[np.float64]
    rank: NDArray[np.float32]
    tick: NDArray[np.float64]


class Scratch(NamedTuple):
    """What one job works in; only the settings outlive an iteration. Seconds, except where noted."""

    settings_M2R: NDArray[np.float64]
    """(threshold, window) of each mechanism on each rank, ratios."""
    on_M: NDArray[np.bool_]
    """Which mechanisms any rank has on."""

    compute_R: NDArray[np.float64]
    """Compute time of each rank; for ranks that run ahead, counted from the end of the step before."""
    spare_R: NDArray[np.float64]
    """Room for a second draw of each rank, no unit."""
    bits_R: NDArray[np.uint32]
    """Random bits of each rank."""
    comm_R: NDArray[np.float32]
    """Time of each rank in its collective."""
    wait_R: NDArray[np.float32]
    """Time of each rank in the barrier."""
    sent_R: NDArray[np.float64]
    """When each sender of a gather leaves it, from the end of the step before; latency not included."""
    arrival_J: NDArray[np.float64]
    """Of a gather or all-to-all: when each member of a group arrives; J members, room for all ranks."""
    order_J: NDArray[np.int64]
    """The members in that order."""
    sender_J: NDArray[np.int64]
    """Which ranks send to one port, in the order in which they start."""
    start_J: NDArray[np.float64]
    """When they start."""
    target_J: NDArray[np.float64]
    """What the port must have served when each message is through."""
    timeout_J: NDArray[np.float64]
    """What a lost window adds to each message."""
    aside_FR: NDArray[np.float32]
    """``(timing.RANK_FIELDS, R)``: estimators of ranks that cannot measure this iteration, as they were before it."""
    order_G: NDArray[np.int64]
    """Group numbers in the order of arrival; kept between iterations, because the next order is much like it."""
    arrival_G: NDArray[np.float64]
    """When each group's collective can start, from the end of the step before, as are the next three."""
    complete_G: NDArray[np.float64]
    """When all ranks of each group have their last gradients; only with overlap."""
    finish_G: NDArray[np.float64]
    """When each group's collective is over."""
    ready_G: NDArray[np.float64]
    """When each group's post-collective work is over."""


class Recording(NamedTuple):
    """Step times of a run and, where asked for, every stamp. Seconds.

    Stamps count from the end of the step before; ranks that run ahead start before that.
    Without stamps T is 0 in all fields but the first.
    """

    step_ET: NDArray[np.float64]
    """How long each step took."""
    start_ETR: NDArray[np.float64]
    """When each rank started its step: 0, or earlier for ranks that run ahead."""
    entry_ETR: NDArray[np.float64]
    """When each rank entered its collective."""
    delay_ETR: NDArray[np.float64]
    """The pacing delay of each rank."""
    exit_ETR: NDArray[np.float64]
    """When each rank left its collective: with its group, senders of a gather earlier."""
    finish_ETG: NDArray[np.float64]
    """When each group's collective was over."""
    ready_ETG: NDArray[np.float64]
    """When each group's post-collective work was over."""
    end_ETI: NDArray[np.float64]
    """When each instruction of a program was over; I is 0 without a program, as O is in the next two."""
    start_ETO: NDArray[np.float64]
    """When each operation of a program started."""
    through_ETO: NDArray[np.float64]
    """When it was through."""


_KINDS = {"uint32": np.uint32, "int64": np.int64, "float32": np.float32, "float64": np.float64, "bool_": np.bool_}


def zeros(fields: type[Any], sizes: Mapping[str, int]) -> Any:
    """A named tuple of arrays of zeros: annotations say of which type, the last letters of names of which axes.

    A field that is no array is 0.
    """
    arrays: list[Any] = []
    for name, annotation in fields.__annotations__.items():
        kind = next((kind for word, kind in _KINDS.items() if word in str(annotation)), None)
        arrays.append(np.zeros([sizes[axis] for axis in name.rpartition("_")[2]], kind) if kind else 0)
    return fields(*arrays)


def scratch(ranks: int, groups: int) -> Scratch:
    """What one job works in."""
    sizes = {"R": ranks, "G": groups, "J": ranks, "F": RANK_FIELDS, "M": len(MECHANISMS), "2": 2}
    room: Scratch = zeros(Scratch, sizes)
    return room


def default_job(environments: int) -> NDArray[np.void]:
    """``JOB`` records ``(E,)`` with every noise and every coupling off; the caller sets what it wants."""
    jobs, neutral = np.zeros(environments, JOB), ("slow_factor", "fail_slow_factor", "warmup_factor", "ranks_per_node")
    lasting = ("fail_slow_mean_iterations", "post_work_mean_iterations", "drift_iterations", "heat_iterations")
    for name in (*neutral, *lasting):
        jobs[name] = 1
    return jobs
