"""Frames of the environment: what each rank did in the last iterations, as text or as a picture.

Legend: R ranks, T iterations, W columns of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceenv.envs.episode_batch import EpisodeBatch
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.phases import Phase, phases

RenderMode: TypeAlias = Literal["ansi", "rgb_array"]
RENDER_MODES: tuple[RenderMode, ...] = ("ansi", "rgb_array")
Frame: TypeAlias = str | NDArray[np.uint8]

LETTERS = {
    "delay": "D",
    "compute": "=",
    "wait for peers": ".",
    "collective": "#",
    "post-collective work": "+",
    "barrier wait": ":",
    "restart": "R",
    "checkpoint": "C",
}
"""What stands for a phase in a text frame."""
_MAX_RANKS = 16
_ITERATIONS, _COLUMNS = 4, 96
_INCHES, _DPI = (8.0, 4.8), 100


def frame(batch: EpisodeBatch, n: int, mode: str) -> Frame:
    """The last iterations of a row: a string, or bytes ``(480, 800, 3)``.

    Of more than 16 ranks some are drawn, evenly. A picture takes about a tenth of a second.
    """
    recording, job = batch.last_interval(n)
    shown = slice(-_ITERATIONS, None)
    last_phases = [Phase(p.name, p.start_TR[shown], p.end_TR[shown]) for p in phases(recording, job)]
    ranks_N = np.unique(np.linspace(0, job.ranks - 1, min(job.ranks, _MAX_RANKS)).round().astype(np.int64))
    step_T = recording.step_ET[0, shown]
    title = _title(batch, n, recording)
    if mode == "ansi":
        return _text(last_phases, step_T, ranks_N, title)
    return _picture(last_phases, step_T, ranks_N, title)


def _title(batch: EpisodeBatch, n: int, recording: Recording) -> str:
    name, interval = batch.names_C[batch.cluster_E[n]], batch.elapsed_E[n]
    text = f"{name}, interval {interval} of {batch.rules.episode_intervals}: {recording.step_ET[0].mean():.4g} s a step"
    if interval and batch.rules.has_twin and batch.terms:
        text += f", {batch.terms['passive_step_mean_s'][n]:.4g} s unpaced ({batch.terms['gain'][n]:+.1%})"
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


def _text(last_phases: Sequence[Phase], step_T: NDArray[np.float64], ranks_N: NDArray[np.int64], title: str) -> str:
    total_s, seen, lines = float(step_T.sum()), set[str](), []
    for rank in ranks_N.tolist():
        line = [" "] * _COLUMNS
        for name, start_s, end_s in _bars(last_phases, step_T, rank):
            first, last = (min(max(round(_COLUMNS * at_s / total_s), 0), _COLUMNS) for at_s in (start_s, end_s))
            line[first:last] = LETTERS[name] * (last - first)
            seen.add(name)
        lines.append(f"rank {rank:>4} {''.join(line)}")
    legend = ", ".join(f"{letter} {name}" for name, letter in LETTERS.items() if name in seen)
    return "\n".join([title, *lines, f"the last {len(step_T)} iterations, {total_s:.4g} s: {legend}", ""])


def _picture(
    last_phases: Sequence[Phase], step_T: NDArray[np.float64], ranks_N: NDArray[np.int64], title: str
) -> NDArray[np.uint8]:
    # here, as drawing is far slower to import than everything that an environment needs
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from paceenv.ui.figures import PHASE_COLOURS, literal

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    panel = figure.add_subplot()
    seen = set[str]()
    for row, rank in enumerate(ranks_N.tolist()):
        bars = _bars(last_phases, step_T, rank)
        spans = [(start_s, end_s - start_s) for _, start_s, end_s in bars]
        colours = [PHASE_COLOURS[name] for name, _, _ in bars]
        panel.broken_barh(spans, (row - 0.42, 0.84), facecolors=colours, lw=0)
        seen |= {name for name, _, _ in bars}
    for end_s in np.cumsum(step_T):
        panel.axvline(end_s, color="black", lw=0.7)
    panel.set(
        xlim=(0.0, 1.01 * float(step_T.sum())), xlabel=f"time, s: the last {len(step_T)} iterations", ylabel="rank"
    )
    panel.set_yticks(range(len(ranks_N)), [str(rank) for rank in ranks_N])
    panel.invert_yaxis()
    panel.set_title(literal(title, 100), fontsize=10, loc="left")
    handles = [Patch(fc=colour, label=name) for name, colour in PHASE_COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
