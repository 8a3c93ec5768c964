"""What all pictures share: size, axes, and one colour per policy."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceenv.errors import InputError

matplotlib.use("Agg")
COLOURS = {
    "passive": "#555555",
    "paper": "#c44e52",
    "adaptive": "#dd8452",
    "learned": "#4c72b0",
    "clairvoyant": "#8172b3",
}
STATIC_COLOUR = "#55a868"
_SIZE = (7.0, 4.2)
SUFFIXES = (".png", ".svg", ".pdf")


def figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, in the house style."""
    made = Figure(figsize=(_SIZE[0] * (1.0 if panels == 1 else 0.75 * panels), _SIZE[1]), dpi=130, layout="constrained")
    found = [made.add_subplot(1, panels, i + 1) for i in range(panels)]
    for axes in found:
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return made, found


def axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """A figure of one panel with its labels."""
    made, (only,) = figure()
    only.set(title=title, xlabel=x, ylabel=y)
    return made, only


def colour(policy: str) -> str:
    """A policy's colour, the same in every picture."""
    return COLOURS.get(policy, STATIC_COLOUR if policy.startswith("static") else "#4c72b0")


def check_path(path: Path) -> None:
    """Refuse a picture that could not be written, before the work that it shows."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path}: allowed: a file that ends in {', '.join(SUFFIXES)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
