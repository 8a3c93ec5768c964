"""What a user may set of the live agent, checked once, with the environment's kill switch applied."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError, out_of_range

MODES = ("off", "observe", "probe", "shadow", "canary", "active")
ACTUATORS = ("host", "device")
ENVIRONMENT_MODE = "PACEENV_LIVE"
"""Environment variable that overrides the mode of every agent in the job; ``off`` is the kill switch."""
ENVIRONMENT_KILL_FILE = "PACEENV_LIVE_KILL_FILE"


@dataclass(frozen=True)
class Options:
    """Settings of one agent; every rank of a job must have the same.

    Parameters
    ----------
    mode : off, observe (measures only), probe (tiny delays by chance, to measure what a delay does), shadow (decides,
        does not delay), canary (paired blocks with and without pacing), active (pacing, with a tenth of the blocks
        without)
    out : folder for trace segments, status and summary; None writes no files
    job : the job's name in traces and metrics; by default the script's
    cap_s, cap_share : longest delay of an iteration, in seconds and as a share of the job's baseline step
    budget_s_per_minute : most seconds of delay in a minute
    probe_s : longest delay in mode probe, seconds; the caps bound it too
    quiet_first : iterations at the start that are never delayed
    interval_iterations : control interval of the policy, as in its training
    block_iterations : length of a block with or without pacing, a multiple of the interval
    min_gain : smallest gain in mean step time that counts as help
    seed : of the order of the blocks, and of the probes; None takes one that all ranks of the launch share
    metrics_port : port of the Prometheus endpoint of the node's first rank, the others follow; None opens none
    metrics_host : address of that endpoint
    kill_file : the agent lets go of the job as soon as this file exists
    actuator : where a delay is spent: ``host`` sleeps in the training thread, ``device`` spins on the GPU's stream
    """

    mode: str = "observe"
    out: Path | None = None
    job: str = ""
    cap_s: float = 0.1
    cap_share: float = 0.1
    budget_s_per_minute: float = 6.0
    probe_s: float = 0.01
    quiet_first: int = 50
    interval_iterations: int = 20
    block_iterations: int = 60
    min_gain: float = 0.01
    seed: int | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    kill_file: Path | None = None
    actuator: str = "host"

    def __post_init__(self) -> None:
        where = "live"
        for name, value, allowed in (("mode", self.mode, MODES), ("actuator", self.actuator, ACTUATORS)):
            if value not in allowed:
                raise out_of_range(name, value, "one of " + ", ".join(allowed), where)
        for name, low, high in (
            ("cap_s", 0.0, 1.0),
            ("cap_share", 0.0, 0.5),
            ("budget_s_per_minute", 0.0, 30.0),
            ("probe_s", 0.0, 1.0),
            ("min_gain", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not (math.isfinite(value) and low <= value <= high):
                raise out_of_range(name, value, f"{low:g} to {high:g}", where)
        for name, low, high in (("quiet_first", 0, 10**9), ("interval_iterations", 1, 10**4)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise out_of_range(name, value, f"a whole number from {low} to {high}", where)
        if type(self.block_iterations) is not int or not (
            self.block_iterations >= self.interval_iterations and self.block_iterations % self.interval_iterations == 0
        ):
            allowed_blocks = f"a multiple of interval_iterations, {self.interval_iterations}"
            raise out_of_range("block_iterations", self.block_iterations, allowed_blocks, where)
        if self.metrics_port is not None and not (type(self.metrics_port) is int and 1 <= self.metrics_port <= 65535):
            raise out_of_range("metrics_port", self.metrics_port, "1 to 65535", where)


def make_options(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
    """Options from keywords, with the environment's word on mode and kill file.

    Raises InputError for an unknown keyword or a value out of range. A mode in the environment that is none counts as
    ``off``: who reaches for the kill switch of a running fleet must not be punished for a typing error.
    """
    known = {f.name for f in fields(Options)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"live: unknown option {unknown[0]}; allowed: {', '.join(sorted(known))}")
    paths = {name: Path(values[name]) for name in ("out", "kill_file") if values.get(name) is not None}
    options = Options(**{**values, **paths})
    if not options.job:
        options = replace(options, job=Path(sys.argv[0]).stem or "job")
    if environ.get(ENVIRONMENT_KILL_FILE):
        options = replace(options, kill_file=Path(environ[ENVIRONMENT_KILL_FILE]))
    override = environ.get(ENVIRONMENT_MODE, "").strip().lower()
    if override:
        options = replace(options, mode=override if override in MODES else "off")
    return options
