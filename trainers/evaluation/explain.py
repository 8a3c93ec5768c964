"""What a policy does on a cluster, as two pictures: its settings over what a rank sees, and a timeline of ranks.

One seed each, beside the same noise without pacing. Talks to the engine. Legend: T iterations, R ranks, N drawn ranks,
B views, O signals, M mechanisms, X values of the slack share, Y values of the collective's inflation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.limits import Limits
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import Clairvoyant
from paceenv.policies.learned import Learned
from paceenv.policies.rollout import run, start
from paceenv.policies.rules import passive
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import Cluster
from paceenv.sim.engine import phases
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.phases import Phase
from paceenv.sim.engine.simulator import JobBatch
from paceenv.ui import figures

ITERATIONS = 600
"""Of the rollouts; stamps and phases stay in memory, about 500 bytes for each rank and iteration."""
TIMELINE_ITERATIONS, TIMELINE_RANKS = 6, 16
HOLD_INTERVALS = 4
"""How long a view is held before the decision counts, so that a policy with memory has time to make up its mind."""
POINTS = 33
SLACK, INFLATION = (signals.NAMES.index(name) for name in ("slack_share", "comm_inflation"))
_SLACK_RANGE, _INFLATION_RANGE = (0.2, 0.8), (1.5, 6.0)
"""Least and greatest upper end of the axes; between them they follow what the rollout met."""
_OFF, _SHOWN, _RANGE = "#d9d9d9", "#ffcc00", "#e8000b"
_RATIOS = (1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
_DOTS = 1200


def explain(policy: str, cluster: Cluster, limits: Limits, seed: int, folder: Path) -> list[Path]:
    """Draw a policy on a cluster; the pictures' paths. A policy that looks ahead has no settings over what it sees.

    Args:
        folder: the files are named after policy and cluster.
    """
    chosen = select_policy(policy, cluster, limits)
    paced, unpaced = (watch(one, cluster, limits, seed, ITERATIONS) for one in (chosen, passive()))
    name = "/".join(Path(policy).parts[-2:]) if ".safetensors" in policy else policy
    title = f"{name} on {cluster.name}, {cluster.ranks} ranks, seed {seed}"
    stem = "-".join(re.sub(r"[^\w.=]+", "-", part) for part in (name, cluster.name))
    paths = [folder / f"{stem}-timeline.png"]
    _draw_timeline(paced, unpaced, name, title, paths[0])
    if isinstance(chosen, Policy):
        paths.append(folder / f"{stem}-settings.png")
        known = chosen.calibrated_range if isinstance(chosen, Learned) else {}
        _draw_settings(cut(chosen, paced.view_BO), paced.view_BO, known, title, paths[1])
    return paths


# A rollout


@dataclass(frozen=True)
class Watched:
    """One job under one policy; seconds. ``view_BO`` are all views on which it decided."""

    batch: JobBatch
    recording: Recording
    view_BO: NDArray[np.float32]

    @property
    def step_T(self) -> NDArray[np.float64]:
        return np.asarray(self.recording.step_ET[0])

    @property
    def delay_TR(self) -> NDArray[np.float64]:
        return np.asarray(self.recording.delay_ETR[0])

    @cached_property
    def phases(self) -> list[Phase]:
        """What the ranks spent their time on."""
        return phases.phases(self.recording, self.batch)

    def wait_s_R(self, shown: slice) -> NDArray[np.float64]:
        """Each rank's mean wait in these steps: for peers, in the barrier, its own delay. The critical wait least."""
        waits = [p.length_TR[shown] for p in self.phases if p.name in {"delay", "wait for peers", "barrier wait"}]
        return np.asarray(np.sum(waits, axis=0).mean(axis=0))


def watch(policy: Policy | Clairvoyant, cluster: Cluster, limits: Limits, seed: int, iterations: int) -> Watched:
    """Run a policy with one seed's noise and keep everything."""
    simulator = start(cluster, np.array([seed]), limits=limits)
    views, recordings = list[NDArray[np.float32]](), list[Recording]()
    run(
        policy,
        simulator,
        iterations,
        on_recording=recordings.append,
        on_settings=lambda _: views.append(simulator.observe(every_rank=True)[0]),
    )
    return Watched(simulator.batch, phases.joined(recordings), np.concatenate(views))


# Settings


@dataclass(frozen=True)
class Slice:
    """Settings ``(Y, X, M, 2)`` over slack, as a share of the step, and time in the collective over its baseline."""

    slack_X: NDArray[np.float64]
    inflation_Y: NDArray[np.float64]
    settings_YXM2: NDArray[np.float64]


def positions(view_BO: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where views lie in a slice: slack share and inflation, ``(B,)`` each."""
    slack_B = signals.unsquash("slack_share", view_BO[:, SLACK])
    return slack_B, np.exp(signals.unsquash("comm_inflation", view_BO[:, INFLATION]))


def cut(policy: Policy, view_BO: NDArray[np.float32]) -> Slice:
    """The slice of a policy through the median of some views, drawn a bit further out than they lie.

    Every point is a rank that sees the same view for ``HOLD_INTERVALS`` control intervals; its last decision counts.
    """
    far_x, far_y = (float(np.percentile(at_B, 99.5)) for at_B in positions(view_BO))
    slack_X = np.linspace(0.0, np.clip(1.2 * far_x, *_SLACK_RANGE), POINTS)
    inflation_Y = np.geomspace(1.0, np.clip(far_y**1.2, *_INFLATION_RANGE), POINTS)
    view_YXO = np.tile(np.median(view_BO, axis=0).astype(np.float32), (POINTS, POINTS, 1))
    view_YXO[..., SLACK] = [signals.squash(x, signals.SCALES[SLACK]) for x in slack_X]
    squashed_Y = [signals.squash(float(np.log(y)), signals.SCALES[INFLATION]) for y in inflation_Y]
    view_YXO[..., INFLATION] = np.array(squashed_Y)[:, None]
    seen_BO = view_YXO.reshape(-1, signals.SIGNALS)
    policy.reset(len(seen_BO))
    settings_BM2 = [np.array(policy.act(seen_BO)) for _ in range(HOLD_INTERVALS)][-1]
    return Slice(slack_X, inflation_Y, settings_BM2.reshape(POINTS, POINTS, len(pacing.MECHANISMS), 2))


def _draw_settings(
    found: Slice,
    view_BO: NDArray[np.float32],
    calibrated_range: Mapping[str, tuple[float, float]],
    title: str,
    path: Path,
) -> None:
    """One panel for each mechanism that is on somewhere: its window over imbalance and contention."""
    window_YXM = found.settings_YXM2[..., pacing.WINDOW]
    on = np.flatnonzero(window_YXM.max(axis=(0, 1)) > 0.0).tolist() or [pacing.SLACK]
    figure, panels = figures.figure(len(on))
    slack_B, inflation_B = positions(view_BO[:: max(1, len(view_BO) // _DOTS)])
    keys = [
        Patch(fc=_OFF, ec="#999999", label="off"),
        Line2D([], [], ls="", marker="o", ms=4, mfc="white", mec="black", label="where the rollout's views lay"),
    ]
    for panel, m in zip(panels, on, strict=True):
        _heat(panel, found, 100.0 * window_YXM[..., m])
        least, most = 100.0 * window_YXM[..., m].min(), 100.0 * window_YXM[..., m].max()
        said = f", always {most:.3g}" if least == most else ""
        panel.set_title(f"{pacing.MECHANISMS[m]}: window, % of the baseline step{said}", fontsize=9)
        ends = panel.get_xlim(), panel.get_ylim()
        panel.plot(100.0 * slack_B, inflation_B, "o", ms=2.2, mfc="white", mec="black", mew=0.4, alpha=0.7)
        if {"slack_share", "comm_inflation"} <= set(calibrated_range):
            left, right = 100.0 * signals.unsquash("slack_share", calibrated_range["slack_share"])
            low, high = np.exp(signals.unsquash("comm_inflation", calibrated_range["comm_inflation"]))
            panel.add_patch(Rectangle((left, low), right - left, high - low, fill=False, ec=_RANGE, ls="--", lw=1.4))
        panel.set(xlim=ends[0], ylim=ends[1])
    if calibrated_range:
        keys.append(Line2D([], [], color=_RANGE, ls="--", label="calibrated range"))
    note = f"other signals at the rollout's median; each point held for {HOLD_INTERVALS} control intervals"
    figure.suptitle(f"{title}\n{note}", fontsize=10)
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figures.save(figure, path)


def _heat(panel: Axes, found: Slice, value_YX: NDArray[np.float64]) -> None:
    panel.set_facecolor(_OFF)
    panel.grid(visible=False)
    most = float(value_YX.max()) or 1.0
    shown_YX, x = np.ma.masked_equal(value_YX, 0.0), 100.0 * found.slack_X
    colours: dict[str, Any] = {"cmap": colormaps["viridis"], "vmin": 0.0, "vmax": most}
    image = panel.pcolormesh(x, found.inflation_Y, shown_YX, **colours, shading="nearest", rasterized=True)
    panel.figure.colorbar(image, ax=panel, pad=0.02)
    highest, ticks = found.inflation_Y[-1], [1.0]
    for ratio in _RATIOS:  # as many as a logarithmic axis has room for
        if ratio <= highest and np.log(ratio / ticks[-1]) >= 0.09 * np.log(highest):
            ticks.append(ratio)
    panel.set(yscale="log", xlabel="slack, % of the step", ylabel="time in the collective / baseline")
    panel.yaxis.set_major_locator(FixedLocator(ticks))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


# Timeline


def _first(paced: Watched) -> int:
    """Where a timeline shows the policy at work: around the last iteration with at least half of the longest delay."""
    last, delay_T = len(paced.step_T) - TIMELINE_ITERATIONS, paced.delay_TR.mean(axis=1)
    if not delay_T.any():
        return last
    return min(last, int(np.flatnonzero(delay_T >= 0.5 * delay_T.max())[-1]) - 1)


def _draw_timeline(paced: Watched, unpaced: Watched, name: str, title: str, path: Path) -> None:
    """Some iterations of two rollouts on the same noise, and both whole rollouts below."""
    begin = _first(paced)
    shown = slice(begin, begin + TIMELINE_ITERATIONS)
    ranks_N = figures.representative(unpaced.wait_s_R(shown), TIMELINE_RANKS)
    if len(ranks_N) < unpaced.batch.ranks:
        title += f"\n{len(ranks_N)} ranks, evenly from the shortest wait to the longest without pacing"
    height = 0.45 + 0.17 * len(ranks_N)
    figure, (above, below, steps, delays) = figures.stack([height, height, 1.7, 1.3])
    figure.suptitle(title, fontsize=10)
    both = {name: paced, "passive": unpaced}
    unit, per_s = ("s", 1.0) if unpaced.step_T.mean() > 10.0 else ("ms", 1e3)
    end = 1.02 * per_s * max(float(one.step_T[shown].sum()) for one in both.values())
    drawn = set[str]()
    for panel, (label, one) in zip((above, below), both.items(), strict=False):
        drawn |= _bars(panel, one, ranks_N, shown, per_s)
        mean = per_s * float(one.step_T[shown].mean())
        panel.set_title(f"{label}: {mean:.4g} {unit} a step here", fontsize=9, loc="left")
        panel.set(xlim=(0.0, end), ylabel="rank")
    below.set_xlabel(f"time, {unit}, from the start of iteration {begin}")
    handles = [Patch(fc=shade, label=phase) for phase, shade in figures.PHASE_COLOURS.items() if phase in drawn]
    handles.append(Patch(fc=_SHOWN, label="the iterations drawn"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    for label, one in both.items():
        shade = figures.colour(label)
        for panel, value_T in ((steps, one.step_T), (delays, one.delay_TR.mean(axis=1))):
            panel.plot(per_s * value_T, color=shade, lw=0.8, alpha=0.8, label=label)
    low, high = per_s * np.percentile(np.concatenate([one.step_T for one in both.values()]), [0.2, 99.8])
    room = 0.1 * (high - low) + 1e-3 * high
    steps.set(ylabel=f"step, {unit}", ylim=(low - room, high + room))
    steps.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderaxespad=0.1)
    delays.set(ylabel=f"mean delay, {unit}", xlabel="iteration", ylim=(0, None if paced.delay_TR.any() else 1.0))
    for panel in (steps, delays):
        panel.set_xlim(0, len(paced.step_T))
        panel.axvspan(shown.start, shown.stop, color=_SHOWN, alpha=0.6, lw=0)
    figures.save(figure, path)


def _bars(panel: Axes, one: Watched, ranks_N: NDArray[np.int64], shown: slice, per_s: float) -> set[str]:
    """Every phase of every drawn rank as bars, a line where a step ends; the names of phases that took time.

    Of ranks that run ahead so many iterations more, which begin before the last one shown ends.
    """
    drawn = slice(shown.start, shown.stop + int(one.batch.jobs[0]["staleness"]))
    end_T = per_s * np.cumsum(one.step_T[drawn])
    begin_T1 = np.concatenate([[0.0], end_T[:-1]])[:, None]
    row_TN = np.broadcast_to(np.arange(len(ranks_N)), (len(end_T), len(ranks_N)))
    names = set[str]()
    for phase in one.phases:
        start_TN, length_TN = (per_s * x[drawn][:, ranks_N] for x in (phase.start_TR, phase.length_TR))
        if length_TN.max() > 0.0:
            left, shade = (begin_T1 + start_TN).ravel(), figures.PHASE_COLOURS[phase.name]
            panel.barh(row_TN.ravel(), length_TN.ravel(), left=left, height=0.82, color=shade, lw=0)
            names.add(phase.name)
    for end in end_T[: shown.stop - shown.start]:
        panel.axvline(end, color="black", lw=0.7)
    panel.set_yticks(range(len(ranks_N)), [str(r) for r in ranks_N], fontsize=7)
    panel.set_ylim(len(ranks_N) - 0.5, -0.5)
    panel.grid(visible=False)
    return names
