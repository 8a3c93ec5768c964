"""Pictures of what each rank did in the last iterations, such as the frames of the environment.

Matplotlib is imported where something is drawn: it is far slower to import than everything that an environment needs.
Legend: T iterations, R ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceenv.envs.episode_batch import EpisodeBatch
from paceenv.sim.engine.layout import Recording
from paceenv.sim.engine.phases import phases
from paceenv.sim.engine.simulator import JobBatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

RenderMode: TypeAlias = Literal["rgb_array"]
RENDER_MODES: tuple[RenderMode, ...] = ("rgb_array",)
Frame: TypeAlias = NDArray[np.uint8]

SHOWN_RANKS = 16
_ITERATIONS = 4
_INCHES, _DPI = (8.0, 4.8), 100


def frame(batch: EpisodeBatch, n: int) -> Frame:
    """The last iterations of a row, bytes ``(480, 800, 3)``, in about a tenth of a second.

    Of more than 16 ranks some are drawn, evenly.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from paceenv.ui.figures import literal

    recording, job = batch.last_interval(n)
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    panel = figure.add_subplot()
    handles = list(draw_ranks(panel, recording, job, _ITERATIONS).values())
    panel.set_xlabel(f"time, s: the last {min(_ITERATIONS, recording.step_ET.shape[1])} iterations")
    panel.set_title(literal(_title(batch, n, recording), 100), fontsize=10, loc="left")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def draw_ranks(panel: Axes, recording: Recording, batch: JobBatch, iterations: int) -> dict[str, Patch]:
    """What ranks did in the last ``iterations`` of a recording's first environment, a row of bars each.

    Returns a patch for the legend of each phase that was drawn, by its name.
    """
    from matplotlib.patches import Patch

    from paceenv.ui.figures import PHASE_COLOURS, representative

    shown_T = slice(-iterations, None)
    step_T = recording.step_ET[0, shown_T]
    begin_T = np.cumsum(step_T) - step_T
    drawn = [phase for phase in phases(recording, batch) if (phase.end_TR > phase.start_TR)[shown_T].any()]
    shown_R = representative(np.arange(batch.ranks, dtype=np.float64), SHOWN_RANKS).tolist()
    shades = [PHASE_COLOURS[phase.op] for phase in drawn for _ in step_T]
    for row, rank in enumerate(shown_R):
        start_s = np.concatenate([begin_T + phase.start_TR[shown_T, rank] for phase in drawn])
        length_s = np.concatenate([(phase.end_TR - phase.start_TR)[shown_T, rank] for phase in drawn])
        spans = list(zip(start_s.tolist(), length_s.tolist(), strict=True))
        panel.broken_barh(spans, (row - 0.42, 0.84), facecolors=shades, lw=0)
    for end_s in np.cumsum(step_T):
        panel.axvline(end_s, color="#222222", lw=0.8)
    panel.set(xlim=(0.0, 1.01 * float(step_T.sum())), ylabel="rank")
    panel.set_yticks(range(len(shown_R)), [str(rank) for rank in shown_R])
    panel.invert_yaxis()
    names = {phase.op for phase in drawn}
    return {name: Patch(fc=colour, label=name) for name, colour in PHASE_COLOURS.items() if name in names}


def _title(batch: EpisodeBatch, n: int, recording: Recording) -> str:
    name, interval = batch.names_C[batch.cluster_E[n]], batch.elapsed_E[n]
    text = f"{name}, interval {interval} of {batch.rules.episode_intervals}: {recording.step_ET[0].mean():.4g} s a step"
    if interval and batch.rules.has_copy and batch.terms:
        text += f", {batch.terms['passive_step_mean_s'][n]:.4g} s unpaced ({batch.terms['gain'][n]:+z.1%})"
    return text
