"""Scaling curves: one job at several sizes, without and with pacing, as it is and with what-ifs. Talks to rollout."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceenv.core import metrics
from paceenv.policies.ranges import Outside
from paceenv.policies.rollout import Engine, run, start_engine
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.ui import figures

_BETWEEN = re.compile(r",(?=\s*[A-Za-z_][\w.]*=)")
"""Between two assignments of a what-if; a list of values has commas of its own."""


@dataclass(frozen=True)
class Point:
    """One job size under one policy: throughput in samples/s, CV of step time, with 95 % intervals over seeds.

    ``outside`` as in ``paceenv.policies.rollout.Rollout``.
    """

    what_if: str
    policy: str
    nodes: int
    ranks: int
    throughput_samples_per_s: float
    throughput_ci95: tuple[float, float]
    cv: float
    cv_ci95: tuple[float, float]
    step_time_s: float
    ideal_step_time_s: float
    efficiency: float
    outside: Outside | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    config: Cluster,
    policy: str,
    what_if: str,
    *,
    seeds: Sequence[int],
    iterations: int,
    threads: int = 1,
    engine: Engine = "fast",
) -> Point:
    """One point; ``efficiency`` is the compute time over the step time, both means."""
    simulator = start_engine(engine, config, np.asarray(seeds), threads)
    found = run(select_policy(policy, config), simulator, iterations)
    mean_E, sd_E = found.step_ET.mean(axis=1), found.step_ET.std(axis=1)
    throughput = metrics.bootstrap_interval(config.samples_per_step / mean_E)
    cv = metrics.bootstrap_interval(sd_E / mean_E)
    return Point(
        what_if,
        policy,
        config.job.nodes,
        simulator.batch.ranks,
        throughput[0],
        throughput[1:],
        cv[0],
        cv[1:],
        float(mean_E.mean()),
        float(found.ideal_step_E.mean()),
        float((simulator.batch.jobs["compute_s"] / mean_E).mean()),
        found.outside,
    )


def curves(
    config: Cluster,
    nodes: Sequence[int],
    policies: Sequence[str],
    what_ifs: Sequence[str] = (),
    *,
    seeds: Sequence[int],
    iterations: int,
    threads: int = 1,
    engine: Engine = "fast",
    on_point: Callable[[int], None] = lambda done: None,
) -> list[Point]:
    """Points of every size, policy and what-if (``key=value`` assignments with commas between), as is first.

    Whatever is impossible is refused before the first point is simulated.
    """
    cases = [("", config)] + [(w, config.changed(_BETWEEN.split(w), "--what-if", "--what-if")) for w in what_ifs]
    sized = [(w, changed.with_nodes(n)) for w, changed in cases for n in nodes]
    points = []
    for what_if, sized_config in sized:
        for policy in policies:
            point = measure(
                sized_config, policy, what_if, seeds=seeds, iterations=iterations, threads=threads, engine=engine
            )
            points.append(point)
            on_point(len(points))
    return points


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Two panels over the number of nodes, throughput and CV; bands are 95 % intervals, line styles what-ifs."""
    figure, (left, right) = figures.figure(2)
    figure.suptitle(title)
    nodes = sorted({p.nodes for p in points})
    styles = dict(zip(dict.fromkeys(p.what_if for p in points), ("-", "--", "-.", ":", (0, (1, 3))), strict=False))
    first = points[0]
    left.plot(nodes, [first.throughput_samples_per_s * n / first.nodes for n in nodes], ":", color="#999999", lw=0.8)
    left.annotate("linear", (nodes[-1], first.throughput_samples_per_s * nodes[-1] / first.nodes), fontsize=7)
    for what_if, policy in dict.fromkeys((p.what_if, p.policy) for p in points):
        line = [p for p in points if (p.what_if, p.policy) == (what_if, policy)]
        x, style, shade = [p.nodes for p in line], styles.get(what_if, ":"), figures.colour(policy)
        label = f"{policy}{f', {what_if}' if what_if else ''}"
        left.plot(x, [p.throughput_samples_per_s for p in line], "o", ls=style, color=shade, ms=3, label=label)
        low_N, high_N = np.array([p.throughput_ci95 for p in line]).T
        left.fill_between(x, low_N, high_N, color=shade, alpha=0.2, lw=0)
        right.plot(x, [p.cv for p in line], "o", ls=style, color=shade, ms=3, label=label)
        low_N, high_N = np.array([p.cv_ci95 for p in line]).T
        right.fill_between(x, low_N, high_N, color=shade, alpha=0.2, lw=0)
    left.set(xlabel="nodes", ylabel="throughput, samples/s", xscale="log", yscale="log")
    right.set(xlabel="nodes", ylabel="coefficient of variation of step time", xscale="log", ylim=(0, None))
    for panel in (left, right):
        panel.set_xticks(nodes, [str(n) for n in nodes])
        panel.minorticks_off()
    left.legend(fontsize=7, handlelength=4)
    figure.savefig(path)
