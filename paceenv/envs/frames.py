"""Frames of the environment: a picture of what each rank did in the last iterations.

Legend: T iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceenv.envs.episode_batch import EpisodeBatch
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.phases import Phase, phases

RenderMode: TypeAlias = Literal["rgb_array"]
RENDER_MODES: tuple[RenderMode, ...] = ("rgb_array",)
Frame: TypeAlias = NDArray[np.uint8]

_MAX_RANKS = 16
_ITERATIONS = 4
_INCHES, _DPI = (8.0, 4.8), 100


def frame(batch: EpisodeBatch, n: int) -> Frame:
    """The last iterations of a row, bytes ``(480, 800, 3)``, in about a tenth of a second.

    Of more than 16 ranks some are drawn, evenly.
    """
    # here, as drawing is far slower to import than everything that an environment needs
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from paceenv.ui.figures import PHASE_COLOURS, literal

    recording, job = batch.last_interval(n)
    shown = slice(-_ITERATIONS, None)
    last_phases = [Phase(p.name, p.start_TR[shown], p.end_TR[shown]) for p in phases(recording, job)]
    ranks = np.unique(np.linspace(0, job.ranks - 1, min(job.ranks, _MAX_RANKS)).round().astype(np.int64)).tolist()
    step_T = recording.step_ET[0, shown]
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    panel, seen = figure.add_subplot(), set[str]()
    for row, rank in enumerate(ranks):
        bars = _bars(last_phases, step_T, rank)
        spans = [(start_s, end_s - start_s) for _, start_s, end_s in bars]
        panel.broken_barh(spans, (row - 0.42, 0.84), facecolors=[PHASE_COLOURS[name] for name, _, _ in bars], lw=0)
        seen |= {name for name, _, _ in bars}
    for end_s in np.cumsum(step_T):
        panel.axvline(end_s, color="black", lw=0.7)
    panel.set(
        xlim=(0.0, 1.01 * float(step_T.sum())), xlabel=f"time, s: the last {len(step_T)} iterations", ylabel="rank"
    )
    panel.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    panel.invert_yaxis()
    panel.set_title(literal(_title(batch, n, recording), 100), fontsize=10, loc="left")
    handles = [Patch(fc=colour, label=name) for name, colour in PHASE_COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def _title(batch: EpisodeBatch, n: int, recording: Recording) -> str:
    name, interval = batch.names_C[batch.cluster_E[n]], batch.elapsed_E[n]
    text = f"{name}, interval {interval} of {batch.rules.episode_intervals}: {recording.step_ET[0].mean():.4g} s a step"
    if interval and batch.rules.has_twin and batch.terms:
        text += f", {batch.terms['passive_step_mean_s'][n]:.4g} s unpaced ({batch.terms['gain'][n]:+z.1%})"
    return text


def _bars(last_phases: Sequence[Phase], step_T: NDArray[np.float64], rank: int) -> list[tuple[str, float, float]]:
    """What a rank did: phase, start and end in seconds from the start of the first iteration shown."""
    begin_T = np.cumsum(step_T) - step_T
    return [
        (phase.name, float(begin_T[t] + phase.start_TR[t, rank]), float(begin_T[t] + phase.end_TR[t, rank]))
        for t in range(len(step_T))
        for phase in last_phases
        if phase.end_TR[t, rank] > phase.start_TR[t, rank]
    ]
