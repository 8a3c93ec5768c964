"""The agent's output: its snapshot and, through the housekeeping thread, trace, status, metrics and summary."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from paceenv.core import probing
from paceenv.core.errors import InputError
from paceenv.live.loop import Loop
from paceenv.live.record.history import compare_ranks
from paceenv.live.record.housekeeping import Housekeeping
from paceenv.live.record.run_folder import RunFolder, write_status
from paceenv.live.record.snapshot import SCHEMA, Snapshot
from paceenv.live.record.summary import summarise, write_summary

STATUS_S, PAGE_S, KILL_FILE_S = 2.0, 600.0, 0.5
"""Seconds between two writes of the status, two writes of the page, and two checks of the kill file."""
FILES_PER_S = 50.0
"""Status files per second that all ranks of a job may write together; a tenth as many trace segments."""
SEGMENT_S = 30.0
MAX_FAILED_CHECKS = 20
"""After this many failed checks of the kill file in a row the agent delays nothing any more."""
MAX_PORT = 65535
EXIT_DEADLINE_S, PATIENCE_S = 5.0, 1.0
"""Longest wait at the end of a job for the last files, and of the page for the other ranks' last status, seconds."""


class Output:
    """Serves one loop, from its first tick on."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._options = loop, loop.options
        self._locality: dict[str, Any] = {}
        self._recorder: Any = None
        self._metrics: Any = None
        self._housekeeping = Housekeeping(loop.messages.log_once)
        self._watch = Housekeeping(
            loop.messages.log_once
        )  # its own thread: a file system that hangs must not hold it up
        self._failed_checks = 0
        self._closed, self._page = False, ""
        loop.on_begin = self._begin

    def compared(self) -> Snapshot:
        """The snapshot, compared with the last status of the other ranks; reads the status files of all of them."""
        own, out = self.snapshot(), self._options.out
        if out is not None:
            with contextlib.suppress(InputError, OSError):
                others = [s for s in RunFolder(out).statuses(own["attempt"]) if s["rank"] != own["rank"]]
                return compare_ranks([own, *others])[0]
        return own

    def close(self) -> None:
        """Write the rest of trace and status; rank 0 prints the page.

        All access to the folder is on the housekeeping thread, which may hold up the end by a few seconds at most.
        """
        if self._closed:
            return
        self._closed = True
        self._watch.stop(0.0)
        self._housekeeping.stop(EXIT_DEADLINE_S)
        if self._metrics is not None:
            self._metrics.close()
        if self._loop.rank == 0 and self._loop.iterations:
            print(self._page or summarise([self.snapshot()]), file=sys.stderr, flush=True)

    def snapshot(self) -> Snapshot:
        """This rank's snapshot (``paceenv.live.record.snapshot``), without reading any file."""
        loop, history, options = self._loop, self._loop.history, self._options
        pacer, policy = loop.control.pacer, loop.policy
        return {
            "schema": SCHEMA,
            "job": options.job,
            "rank": loop.rank,
            "world_size": loop.world_size,
            "host": self._locality.get("host", ""),
            "pid": os.getpid(),
            "attempt": loop.attempt,
            "unix_time_s": time.time(),
            "final": self._closed,
            "mode": options.mode,
            "state": loop.state,
            "reason": loop.reason,
            "iterations": loop.iterations,
            "regular": history.count,
            "irregular": loop.irregular,
            "step": history.step() | {"baseline_s": pacer.step_baseline_s if pacer else None},
            "parts": history.parts(),
            "own": history.own(),
            "wait": history.wait() | {"baseline_s": pacer.comm_baseline_s if pacer else None},
            "arrival": history.arrival(loop.members),
            "pacing": loop.control.delays(),
            "canary": _verdict(loop),
            "probe": loop.control.probe.snapshot() if loop.control.probe is not None else None,
            "group": loop.group(),
            "stamps": {"dropped": loop.dropped_stamps},
            "overhead": history.overhead(),
            "policy": {"name": policy.policy.name, "source": policy.source, "sha256": policy.sha256},
            "locality": self._locality,
            "trace": self._recorder.counts if self._recorder else {"rows": 0, "dropped": 0, "segments": 0},
            "events": list(loop.messages.events),
        }

    def _begin(self) -> None:
        """The first tick, on the training thread: describe this rank's place, start the background tasks."""
        from paceenv.live.observe import locality

        loop, options, keep = self._loop, self._options, self._housekeeping
        self._locality = locality.describe(
            device=loop.device, backend=loop.backend, rank=loop.rank, world_size=loop.world_size
        )
        if options.out is not None:
            self._record(options.out)
            keep.add(
                "the status", max(STATUS_S, loop.world_size / FILES_PER_S), partial(self._write_status, options.out)
            )
            if loop.rank == 0:
                keep.add("the summary", PAGE_S, partial(self._write_page, options.out))
        if options.metrics_port is not None:
            self._serve(options.metrics_port)
        if options.kill_file is not None:
            self._watch.add("the check of the kill file", KILL_FILE_S, self._check_kill_file)
            self._watch.start()
        keep.start()
        if loop.rank == 0:
            loop.messages.log_once(self._greeting(), level=20)

    def _record(self, out: Path) -> None:
        from paceenv.live.record.recorder import TraceRecorder, rank_metadata

        loop, probe = self._loop, self._loop.control.probe
        metadata = rank_metadata(
            self._options.job,
            {probing.METADATA_KEY: probe.plan.to_json()} if probe is not None else {},
            rank=loop.rank,
            world_size=loop.world_size,
            attempt=loop.attempt,
            locality=self._locality,
        )
        self._recorder = TraceRecorder(
            out,
            metadata,
            rank=loop.rank,
            attempt=loop.attempt,
            problem=loop.messages.log_once,
            segment_s=max(SEGMENT_S, 10.0 * loop.world_size / FILES_PER_S),
        )
        loop.listeners.append(self._recorder.append)
        self._housekeeping.add("the trace", 1.0, self._recorder.write)

    def _serve(self, port: int) -> None:
        from paceenv.live.record.prometheus import MetricsServer

        port += int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
        if port > MAX_PORT:
            self._loop.messages.log_once(f"no metrics: port {port} of this local rank; allowed: up to {MAX_PORT}")
            return
        server = MetricsServer(
            self.snapshot, port, host=self._options.metrics_host, problem=self._loop.messages.log_once
        )
        self._metrics = server
        self._housekeeping.once("the metrics", server.start)

    def _write_status(self, out: Path, final: bool) -> None:
        write_status(out, self.snapshot() | {"final": final})

    def _write_page(self, out: Path, final: bool) -> None:
        page = write_summary(out, self.snapshot() | {"final": final}, PATIENCE_S if final else 0.0)
        self._page = page if final else ""

    def _check_kill_file(self, final: bool) -> None:
        file = self._options.kill_file
        if final or file is None:
            return
        try:
            found = file.exists()
            self._failed_checks = 0
        except OSError as error:
            found = False
            self._failed_checks += 1
            if self._failed_checks == MAX_FAILED_CHECKS:
                self._loop.downgrade(f"the kill file {file} cannot be checked: {error.strerror}")
        if found:
            self._loop.stop(f"stopped by the kill file {file}")

    def _greeting(self) -> str:
        loop, options = self._loop, self._options
        times = "times by the host's clock" if loop.device == "cpu" else f"times by events on {loop.device}"
        where = f"{loop.world_size} rank{'s' * (loop.world_size > 1)}, {loop.backend or 'no process group'}, {times}"
        files = f", files in {options.out}" if options.out is not None else ""
        probing = options.mode == "probe"
        by = f"probes of at most {1e3 * options.probe_s:g} ms" if probing else f"policy {loop.policy.source}"
        return f"mode {loop.state}, {by}, {where}{files}"


def _verdict(loop: Loop) -> dict[str, Any] | None:
    v = loop.control.verdict
    if v is None:
        return None
    gain, low, high = v.gain or (None, None, None)
    return {"verdict": v.kind, "text": v.text, "gain": gain, "low": low, "high": high, "pairs": v.pairs}
