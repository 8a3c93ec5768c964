"""Names that have changed: an old name keeps working for one version, with a warning that gives the new one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED_MECHANISMS = {"slide": "phase_shift"}
RENAMED_CONFIGS = {"suites": {"slide": "phase-shift"}}
"""New names of packaged configs, by kind and old name."""


class RenamedWarning(FutureWarning):
    """An old name was used; the message gives the new one."""


def new_name(name: Any, renamed: Mapping[str, str], where: str) -> Any:
    """The current name for ``name``.

    Args:
        name: what the user wrote; anything but a key of ``renamed`` is returned as it is.
        renamed: new names by old name.
        where: what the warning says first, for example ``"config"``.
    """
    if not isinstance(name, str) or name not in renamed:
        return name
    warnings.warn(f"{where}: {name} is now called {renamed[name]}", RenamedWarning, stacklevel=2)
    return renamed[name]


def mechanism_name(name: Any) -> Any:
    """The current name of a pacing mechanism; an old one is replaced with a warning."""
    return new_name(name, RENAMED_MECHANISMS, "mechanism")
