"""What stands in the way of a mode, as far as it can be known before the training script starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceenv.core.errors import needs
from paceenv.live.options import DECIDING, Options

if TYPE_CHECKING:  # it brings NumPy, which the script may want to import itself
    from paceenv.policies.base import Policy


def obstacle(options: Options, policy: Policy | str | os.PathLike[str] | None) -> str:
    """Why the mode cannot be entered, or files cannot be written; "" if nothing that can be known yet prevents it.

    What only a running job shows (a rank without an agent, signals outside the policy's range) is not looked at.
    """
    if options.mode == "off":
        return ""
    if options.out is not None and (why := _unwritable(options.out)):
        return f"out = {str(options.out)!r}: {why}"
    if options.kill_file is not None and _there(options.kill_file):
        return f"kill_file {options.kill_file} is there already, and the agent would detach at once"
    if options.mode not in DECIDING:
        return ""
    try:
        from paceenv.live.decide.live_policy import needed_policy
    except ImportError as error:
        return str(needs("a policy", error.name or str(error), "live"))

    return needed_policy(options.mode, policy, options.candidates).fault


def _there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:
        return False


def _unwritable(folder: Path) -> str:
    """Why nothing can be written into a folder, which need not be there yet; "" if it can."""
    while not _there(folder):
        if folder == folder.parent:
            return "no such folder"
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written to"
