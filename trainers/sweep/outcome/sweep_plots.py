"""The pictures of a sweep: candidates and their front, parallel coordinates, importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from paceenv.trainers.sweep.outcome.importance import parameter_names, parameter_table
from paceenv.trainers.sweep.outcome.sweep_results import COLUMNS, SCORE, UNTIL, Candidate, Results
from paceenv.ui import figures

ALL_COLOUR, FRONT_COLOUR, BEST_COLOUR = "#c5cad3", "#4c72b0", "#c44e52"
PERCENT = ("throughput",)


def shown(name: str, values: Sequence[float]) -> list[float]:
    """Values of an objective as axes show them.

    Args:
        name: of the objective.
        values: as the sweep keeps them.
    """
    return [100.0 * value for value in values] if name in PERCENT else list(values)


def label(name: str) -> str:
    """An objective's axis."""
    return f"{COLUMNS[name]}{', %' if name in PERCENT else ''}"


def axes_of(results: Results) -> tuple[str, str]:
    """What a Pareto plot has on x and y: the second objective and the first, where there is but one CV or decisions."""
    first, *others = results.objectives
    return (others[0] if others else UNTIL if first == SCORE else "cv"), first


def pareto(results: Results, path: Path) -> None:
    """All candidates, the front, the winner; a panel for each cluster that was searched by itself, at most twelve.

    Args:
        results: of the sweep.
        path: of the picture.
    """
    clusters = results.clusters[:12]
    columns = min(len(clusters), 3)
    figure, panels = figures.grid(-(-len(clusters) // columns), columns)
    flat = [panel for row in panels for panel in row]
    for cluster, panel in zip(clusters, flat, strict=False):
        _pareto_panel(results, cluster, panel)
    for panel in flat[len(clusters) :]:
        panel.set_axis_off()
    figures.save(figure, path)


def _pareto_panel(results: Results, cluster: str, panel: Axes) -> None:
    x, y = axes_of(results)
    mine = [c for c in results.candidates if c.cluster == cluster and x in c.values]
    front, best = [c for c in results.front(cluster) if x in c.values], results.best(cluster)

    def draw(candidates: Sequence[Candidate], style: str, **how: object) -> None:
        xs, ys = ([c.values[name] for c in candidates] for name in (x, y))
        panel.plot(shown(x, xs), shown(y, ys), style, **how)  # type: ignore[arg-type]

    draw(mine, "o", color=ALL_COLOUR, ms=3, label=f"{len(mine)} candidates")
    draw(sorted(front, key=lambda c: c.values[x]), "o-", color=FRONT_COLOUR, ms=4, lw=1, label="front")
    if best is not None and x in best.values:
        draw([best], "*", color=BEST_COLOUR, ms=11, label="winner")
    panel.set(title=cluster or results.config.name, xlabel=label(x), ylabel=label(y))
    panel.legend(fontsize=7)


def parameters(results: Results, shares: Mapping[str, float], path: Path) -> None:
    """Draw parallel coordinates over the parameters, coloured by the first objective, with each one's importance below.

    Args:
        results: of the sweep.
        shares: importance of each parameter.
        path: the file.
    """
    names = parameter_names(results.candidates)
    table = parameter_table(results.candidates, names)
    low, width = table.min(axis=0), np.ptp(table, axis=0)
    place = (table - low) / np.where(width > 0.0, width, 1.0)
    goodness = np.array([results.goodness(c)[0] for c in results.candidates])
    rank = goodness.argsort().argsort() / max(len(goodness) - 1, 1)
    figure, (lines, bars) = figures.stack([3.2, 0.35 * max(len(shares), 1) + 0.6])
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for i in np.argsort(rank):
        lines.plot(place[i], color=colours(rank[i]), alpha=0.15 + 0.6 * rank[i] ** 3, lw=0.8)
    ticks = [f"{name}\n{a:g} to {a + b:g}" for name, a, b in zip(names, low, width, strict=True)]
    lines.set(
        xticks=range(len(names)),
        xticklabels=ticks,
        yticks=[],
        title=f"{results.config.name}: bright lines have the best {COLUMNS[results.objectives[0]]}",
    )
    lines.tick_params(axis="x", labelsize=7)
    bars.barh(list(shares), list(shares.values()), color=FRONT_COLOUR)
    bars.invert_yaxis()
    bars.set(xlabel=f"importance for {COLUMNS[results.objectives[0]]} (PED-ANOVA)", xlim=(0, 1))
    figures.save(figure, path)
