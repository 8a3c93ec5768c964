"""Opens the sinks that a rank has, and writes to them on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from paceenv.live.record.housekeeping import Housekeeping
from paceenv.live.record.snapshot import Snapshot
from paceenv.live.sinks.sink import Sink

PERIOD_S: Final = 10.0
"""Shortest time between two writes of a sink."""
WRITES_PER_S: Final = 50.0
"""Writes per second that all ranks of a job may make together."""
EVERY_RANK: Final = ("textfile", "otlp")
"""Sinks of every rank; the others belong to the user's run and get the numbers of rank 0."""


def open_sinks(
    chosen: Mapping[str, str],
    snapshot: Callable[[], Snapshot],
    problem: Callable[[str], None],
    *,
    rank: int,
    world_size: int,
) -> Housekeeping | None:
    """Begin the chosen sinks of this rank, and write to them on a thread of their own; None if it has none.

    A tracking server that hangs holds up this thread and nothing else. Call it on the training thread.

    Args:
        chosen: the sinks by name, with their setting or "".
        snapshot: makes the snapshot to show.
        problem: called once with one line for a sink that fails.
        rank: this rank.
        world_size: ranks of the job.
    """
    keep = Housekeeping(problem)
    some = False
    for name in sorted(chosen, key=lambda name: name != "textfile"):  # which must go at the end, whoever hangs
        setting = chosen[name]
        if rank != 0 and name not in EVERY_RANK:
            continue
        try:
            sink = _make(name, setting)
            sink.begin()
        except Exception as error:
            problem(f"sink {name} failed: {' '.join(str(error).split()) or type(error).__name__}")
            continue
        period_s = max(PERIOD_S, world_size / WRITES_PER_S) if name in EVERY_RANK else PERIOD_S
        keep.add(f"sink {name}", period_s, partial(_write, sink, snapshot))
        some = True
    if some:
        keep.start()
    return keep if some else None


def _write(sink: Sink, snapshot: Callable[[], Snapshot], final: bool) -> None:
    sink.write(snapshot(), final)


def _make(name: str, setting: str) -> Sink:
    """The sink of this name; its file is imported only now."""
    if name == "textfile":
        from paceenv.live.sinks.textfile import Textfile

        return Textfile(setting)
    if name == "otlp":
        from paceenv.live.sinks.otlp import Otlp

        return Otlp(setting)
    if name == "tensorboard":
        from paceenv.live.sinks.tensorboard_writer import TensorboardWriter

        return TensorboardWriter()
    if name == "wandb":
        from paceenv.live.sinks.wandb_run import WandbRun

        return WandbRun()
    from paceenv.live.sinks.mlflow_run import MlflowRun

    return MlflowRun()
