"""Shared parts of all pictures: size, axes, colours of policies and phases, shown ranks, writing."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from paceenv.core.files import atomic_write

matplotlib.use("Agg")
COLOURS = {
    "passive": "#555555",
    "paper": "#c44e52",
    "adaptive": "#dd8452",
    "learned": "#4c72b0",
    "clairvoyant": "#8172b3",
}
STATIC_COLOUR = "#55a868"
PHASE_COLOURS = {
    "delay": "#c44e52",
    "compute": "#aebfd8",
    "forward": "#aebfd8",
    "backward": "#6f8fc0",
    "wait for peers": "#f3dfa6",
    "collective": "#1f7a8c",
    "send, receive": "#7fb8a4",
    "other work": "#b9a9d6",
    "optimizer": "#8172b3",
    "barrier wait": "#e3c26f",
    "restart": "#222222",
    "checkpoint": "#777777",
}
"""What a rank spends its time on (``sim.engine.phases``, ``report.rank_pictures``); shades of yellow are waits."""
_SIZE = (7.0, 4.2)


def figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, in the house style."""
    made = Figure(figsize=(_SIZE[0] * (1.0 if panels == 1 else 0.75 * panels), _SIZE[1]), dpi=130, layout="constrained")
    return made, [_plain(made.add_subplot(1, panels, i + 1)) for i in range(panels)]


def stack(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """A wide figure of panels under each other, of these heights in inches, in the house style."""
    made = Figure(figsize=(1.6 * _SIZE[0], sum(heights) + 1.0), dpi=130, layout="constrained")
    shape = made.add_gridspec(len(heights), 1, height_ratios=heights)
    return made, [_plain(made.add_subplot(shape[i])) for i in range(len(heights))]


def _plain(panel: Axes) -> Axes:
    panel.grid(alpha=0.3)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    return panel


def axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    made, (only,) = figure()
    only.set(title=title, xlabel=x, ylabel=y)
    return made, only


def colour(policy: str) -> str:
    """A policy's colour, the same in every picture."""
    return COLOURS.get(policy, STATIC_COLOUR if policy.startswith("static") else "#4c72b0")


def save(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all; the suffix gives the file type."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:])
    atomic_write(path, content.getvalue())


def svg(figure: Figure, title: str) -> str:
    """A figure as SVG of a page: text stays text, width follows the page; ``title`` is for screen readers."""
    content = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceenv"}):
        figure.savefig(content, format="svg", metadata=nothing)
    text = content.getvalue()
    text = text[text.index("<svg") :].replace("\n", " ")
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # numbered alike in every figure, and nothing refers to them
    label = f'<svg role="img" aria-label="{html.escape(title)}"'
    return re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', lambda m: f"{label} {m[1]}>", text, count=1)


def literal(text: str, most: int = 48) -> str:
    """Text from a file as a label: cut to a length, and no part of it becomes a formula or a line end."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (shown if len(shown) <= most else f"{shown[: most - 1]}…").replace("$", r"\$")


def representative(value_R: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """At most ``most`` ranks, in their order: all, or evenly from the smallest value to the largest."""
    ranks = len(value_R)
    if ranks <= most:
        return np.arange(ranks)
    by_value = np.argsort(value_R, kind="stable")
    return np.sort(by_value[np.rint(np.linspace(0, ranks - 1, most)).astype(np.int64)])
