"""The engine's data layout: what one simulated job is told (``JOB``, ``TENANT``) and what it remembers.

``paceenv.cluster`` fills the parameter records; the kernel reads them and owns the state. Axes: E environments (jobs
side by side), R ranks, G process groups, K tenants. Everything is float64 unless named otherwise; times in seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

JOB = np.dtype(
    [
        ("compute_s", "f8"),
        ("jitter_cv", "f8"),
        ("common_cv", "f8"),
        ("persistent_cv", "f8"),
        ("slow_ranks", "i8"),
        ("slow_factor", "f8"),
        ("imbalance_cv", "f8"),
        ("imbalance_table", "i8"),
        ("fail_slow_share", "f8"),
        ("fail_slow_mean_iterations", "f8"),
        ("fail_slow_factor", "f8"),
        ("drift_cv", "f8"),
        ("drift_iterations", "f8"),
        ("stall_rate", "f8"),
        ("stall_mean_s", "f8"),
        ("transfer_alone_s", "f8"),
        ("uplink_work_s", "f8"),
        ("latency_s", "f8"),
        ("has_barrier", "?"),
        ("barrier_s", "f8"),
        ("exposed_s", "f8"),
        ("exposed_groups", "i8"),
        ("exposed_share", "f8"),
        ("exposed_mean_iterations", "f8"),
        ("exposed_episode_s", "f8"),
        ("exposed_spread", "f8"),
        ("cap_s", "f8"),
        ("ideal_step_s", "f8"),
    ],
    align=True,
)
"""Parameters of one job. ``transfer_alone_s`` is a group's collective on its own links; ``uplink_work_s`` what of it
occupies the shared uplink, in seconds of the whole uplink. ``imbalance_table`` indexes the quantile tables.
``ideal_step_s`` is the closed-form step without noise and contention: the reference of reward and reports."""

TENANT = np.dtype(
    [
        ("compute_s", "f8"),
        ("uplink_work_s", "f8"),
        ("rate_cap", "f8"),
        ("weight", "f8"),
        ("jitter_cv", "f8"),
        ("ranks", "f8"),
    ],
    align=True,
)
"""A co-tenant on the uplink: computes, then transfers ``uplink_work_s`` at no more than ``rate_cap`` of the uplink,
then computes again, as long as the slowest of its ``ranks``. ``weight`` is its share in a tie relative to one of our
groups; weight 0 means absent."""

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
        ("exposed_next", "i8"),
        ("exposed_count", "i8"),
    ],
    align=True,
)
"""Per-environment state. Times are relative to the end of the last step, so precision never decays. ``*_next`` is the
flattened index ``iteration * R + rank`` (or group) of the next rare event, ``*_count`` how many were drawn; ``delay_s``
is the mean delay of all ranks over the last run."""

# noise[N, R]
FACTOR, DRIFT_X, SLOW_UNTIL = 0, 1, 2
NOISE_FIELDS = 3
# group[N, G]
EXPOSED_UNTIL, EXPOSED_NOW_S, FIXED_EXPOSED_S = 0, 1, 2
GROUP_FIELDS = 3
# tenant[N, K]
NEXT_S, LEFT_S, CYCLES = 0, 1, 2
TENANT_FIELDS = 3


def default_job(environments: int) -> NDArray[np.void]:
    """``JOB`` records ``(E,)`` with every noise and every coupling off; the caller sets what it wants."""
    jobs = np.zeros(environments, JOB)
    jobs["slow_factor"] = 1.0
    jobs["fail_slow_factor"] = 1.0
    jobs["fail_slow_mean_iterations"] = 1.0
    jobs["exposed_mean_iterations"] = 1.0
    jobs["drift_iterations"] = 1.0
    return jobs
