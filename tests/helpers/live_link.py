"""A limited link for real jobs, and the job whose process groups share it with unequal slack.

:func:`limited_link` makes a network namespace whose loopback interface is a token bucket: all ranks that run in it
share that many bits per second, whoever they talk to. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from live_jobs import root_and

_numbers = itertools.count()


@contextlib.contextmanager
def limited_link(rate_mbps: float) -> Iterator[str]:
    """The name of a fresh namespace with ``rate_mbps`` megabits per second between all who live in it."""
    root_and("ip", "tc")
    name = f"paceenv-{os.getpid()}-{next(_numbers)}"
    _run("ip", "netns", "add", name)
    try:
        inside = ("ip", "netns", "exec", name)
        _run(*inside, "ip", "link", "set", "lo", "mtu", "1500", "up")
        _run(*inside, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
        bucket = ("rate", f"{rate_mbps:g}mbit", "burst", "16kb", "latency", "1s")
        _run(*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket)
        yield name
    finally:
        _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


def pairs(
    *,
    iterations: int,
    payload_bytes: int,
    buckets: int,
    compute_s: float,
    post_work_s: float,
    **options: Any,
) -> dict[str, Any]:
    """Pairs of ranks that reduce among themselves and meet in a barrier at the end of the step, under the agent.

    Every rank computes for ``compute_s``, then its pair reduces ``payload_bytes`` in ``buckets`` parts, as a reducer
    does, which is also what makes pairs share a link evenly. The first pair then has work of ``post_work_s`` to do, for
    which all others wait. Compute is sleeping. Returns step times by this rank's clock and the agent's last summary.
    """
    import torch
    import torch.distributed as dist

    from paceenv import live
    from paceenv.policies.rules import Static

    rank = dist.get_rank()
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    parts = torch.ones(payload_bytes // 4).chunk(buckets)
    policy = Static({"slack": (0.05, 0.4)})
    policy.interval_iterations = 10
    agent = live.attach(None, policy, **options)
    steps_s, last_s = [], time.perf_counter()
    for _ in range(iterations):
        time.sleep(compute_s)
        for part in parts:
            dist.all_reduce(part, group=groups[rank // 2])
        if rank < 2:
            time.sleep(post_work_s)
        dist.barrier()
        now_s = time.perf_counter()
        steps_s.append(now_s - last_s)
        last_s = now_s
        agent.tick()
    agent.detach()
    return {"steps_s": steps_s, "summary": agent.summary()}
