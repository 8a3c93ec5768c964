"""The agent's options: the one list of their names, types, defaults, allowed values and meanings.

The command line of ``-m paceenv.live``, its ``--help``, the checks and the table in the documentation are made
from :class:`Options`. This module also applies the kill switch of the environment.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from paceenv.core.errors import InputError, out_of_range
from paceenv.core.limits import LIMITS, MAX_BUDGET_S, MAX_CAP_S

MODES = ("off", "observe", "probe", "shadow", "canary", "active")
PACED, DECIDING = MODES[4:], MODES[3:]
"""Modes that delay by a policy; and those that need one."""
DELAYING = ("probe", *PACED)
KILL_SWITCH = "PACEENV_LIVE"
"""Environment variable; any value but :data:`SWITCHED_ON` turns every agent off: no typing error keeps one running."""
SWITCHED_ON = ("", "on", "1")
LAUNCHER_SETTINGS: dict[str, Any] = {}
"""Arguments from the command line of ``-m paceenv.live``; they replace those of ``live.attach``. Empty without it."""
IN_A_GROUP_ONLY = "in_a_group_only"
"""Beside those arguments: this process was started by the script, so it is watched only as a rank of a group."""


class Meaning(NamedTuple):
    """What an option means, and its allowed values; ``unset``: what happens without one."""

    help: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    unset: str = ""

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty where everything of the type is."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"{self.low:.12g} to {self.high:.12g}" if self.low > -math.inf else ""


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field of :class:`Options`, with its :class:`Meaning`."""
    return field(default=default, metadata={"meaning": Meaning(help, **more)})


@dataclass(frozen=True)
class Options:
    """Settings of one agent. Every rank of a job must have the same. Raises InputError for a value out of range."""

    mode: str = _option("observe", "What the agent may do", choices=MODES)
    out: Path | None = _option(None, "Folder for trace, status and summary, the same for all ranks", unset="no files")
    job: str = _option("", "The job's name in traces and metrics", unset="the script's name")
    cap_s: float = _option(LIMITS.cap_s, "Longest delay before an iteration, seconds", low=0, high=MAX_CAP_S)
    cap_share: float = _option(LIMITS.cap_share, "Longest delay as a share of the job's baseline step", low=0, high=1)
    budget_s_per_minute: float = _option(
        LIMITS.budget_s_per_minute, "Most delay in any minute, seconds; 60 is no limit", low=0, high=MAX_BUDGET_S
    )
    probe_s: float = _option(
        0.01, "Longest delay in mode probe, seconds; the two caps and a tenth of the step limit it too", low=0, high=1
    )
    quiet_first: int = _option(LIMITS.quiet_first, "Iterations at the start without any delay", low=0, high=10**9)
    block_iterations: int | None = _option(
        None,
        "Iterations of a block with or without pacing",
        low=6,
        high=10**6,
        unset="from the policy's time constants: 60, or 240 where it may shift phases",
    )
    candidates: str = _option(
        "",
        "What takes turns in modes canary and active, each against no pacing: names and files as for the policy, "
        "separated by semicolons; defaults is the default constant of each mechanism",
        unset="the policy alone",
    )
    seed: int | None = _option(
        None, "Seed of the order of the blocks and of the probes", unset="one that all ranks of the launch share"
    )
    metrics_port: int | None = _option(
        None,
        "Port of the Prometheus endpoint of a node's first rank; the other ranks use the next ones",
        low=1,
        high=65535,
        unset="no endpoint",
    )
    metrics_host: str = _option("127.0.0.1", "Address of that endpoint")
    kill_file: Path | None = _option(None, "The agent detaches as soon as this file exists", unset="none")
    defer: str = _option(
        "",
        "Asynchronous transfers that rule defer may hold back, on gloo: kinds such as all_reduce, and names or "
        "descriptions of process groups, separated by commas",
        unset="none",
    )

    def __post_init__(self) -> None:
        for option in OPTIONS:
            means, value = option.metadata["meaning"], getattr(self, option.name)
            whole = option.type in (int, int | None)
            if means.choices:
                fits = value in means.choices
            elif means.low == -math.inf or (value is None and option.default is None):
                continue
            else:
                number = type(value) is int or (not whole and isinstance(value, (int, float)))
                fits = number and means.low <= value <= means.high  # not-a-number fails too
            if not fits:
                raise out_of_range(option.name, value, "a whole number from " * whole + means.allowed, "live")


OPTIONS = fields(Options)
"""Their names, types, defaults, and ``metadata["meaning"]``."""


def make_options(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
    """Options from keywords, with the kill switch of the environment applied.

    Their paths are absolute: a script that changes its folder later (Hydra does) does not move the agent's files, nor
    the kill file. Raises InputError for an unknown option, or a value out of range.
    """
    known = {option.name for option in OPTIONS}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"live: unknown option {unknown[0]}; allowed: {', '.join(sorted(known))}")
    paths = {name: Path(os.path.abspath(values[name])) for name in ("out", "kill_file") if values.get(name) is not None}
    options = Options(**{**values, **paths})
    if not options.job:
        options = replace(options, job=Path(sys.argv[0]).stem or "job")
    return replace(options, mode="off") if environ.get(KILL_SWITCH, "") not in SWITCHED_ON else options


def absolute_policy(text: str | None) -> str | None:
    """A policy's name with the file in it, if there is one, as an absolute path: ``static:/here/my-cluster.yaml``."""
    prefix, name = ("static:", text[7:]) if text and text.startswith("static:") else ("", text or "")
    for file, option in ((name, ""), name.rpartition(":")[::2]):
        named = "." in file or os.sep in file  # else it is the name of a rule, which goes before a file of that name
        if named and os.path.isfile(file):
            return f"{prefix}{os.path.abspath(file)}{option and ':'}{option}"
    return text
