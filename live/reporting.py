"""The agent's output: its snapshot and, through the housekeeping thread, trace, status, metrics and summary."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import Any

from paceenv.core.wording import IN_VAIN, duration
from paceenv.live.control_file import ControlReader
from paceenv.live.decide.live_policy import SEPARATOR
from paceenv.live.identity import Identity, Rendezvous, settings_digest
from paceenv.live.last_words import LastWords
from paceenv.live.log_once import described, place_in_script
from paceenv.live.loop import Loop
from paceenv.live.observe.locality import describe
from paceenv.live.options import DELAYING
from paceenv.live.record.course import STILL_S, Course
from paceenv.live.record.findings import ALONE
from paceenv.live.record.history import unseen
from paceenv.live.record.housekeeping import Housekeeping, background
from paceenv.live.record.run_folder import SILENT_S, RunFolder, status_period_s, write_status
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.snapshot import ASKED, SCHEMA, Snapshot, number
from paceenv.live.record.summary import summarise, write_summary
from paceenv.live.store_messages import Peers, poll_s

PAGE_S, PAGE_S_PER_RANK = 60.0, 0.6
"""Seconds between two comparisons of the ranks, which make the page: ten minutes at 1,000 ranks."""
KILL_FILE_S = 0.5
"""Seconds between two checks of the kill file."""
ACCOUNTS_S, DESCRIPTOR_S = 0.5, 2.0
"""Seconds between two visits to the accounts, and two looks at the wake-up descriptor."""
FIRST_STATUS_S = 0.4
"""By then the ranks know the job's attempt; who ends soon after is told by it."""
MAX_GROUPS = 64
EXIT_DEADLINE_S, PATIENCE_S = 5.0, 1.0
"""Longest wait at the end of a job for the last files, and of the page for the other ranks' last status, seconds."""
IN_VAIN_S, LAST_PATIENCE_S, FEW_RANKS = 0.5, 0.2, 64
"""The same where ranks waited in vain for another one; where SIGTERM ends a job, of so few ranks that their files can
be read twice until then."""


class Output:
    """Serves one loop, from when its rank is known."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._options = loop, loop.options
        self._locality: dict[str, Any] = {}
        self._recorder: Any = None
        self._control: ControlReader | None = None
        self._rendezvous: Rendezvous | None = None
        self._group: tuple[int, int, Any] = 0, 1, None  # that it is of: rank, number of ranks, store
        self._metrics: Any = None
        self._housekeeping = Housekeeping(loop.messages.log_once)
        self._threads = list[Housekeeping]()  # beside the housekeeping, and not waited for
        self._verdicts: dict[str, Any] = {}  # on rank 0 of all ranks, for the metrics
        self._closed, self._page, self._patience_s = False, "", PATIENCE_S
        self._ended, self._at = "", ""
        self._told = 0, 0.0  # while a standstill lasts that was told: the iterations before it, and its length then
        self._newest: tuple[Any, Any, float] = -1, (), 0.0  # iterations and collectives that a snapshot met, and when
        self._printing = threading.Lock()
        self._last_words = LastWords(self.leave_last_words)
        loop.on_begin = self._begin

    def close(self) -> None:
        """Write the rest of trace and status; rank 0 prints the page.

        All access to the folder is on the housekeeping thread, which may hold up the end by a few seconds at most.
        """
        if self._closed:
            return
        self._closed = True
        if self._rendezvous is not None:
            self._loop.identity = self._rendezvous.settle()
        self._housekeeping.stop(EXIT_DEADLINE_S)
        for thread in self._threads:
            thread.stop(0.0)
        if self._metrics is not None:
            self._metrics.close()
        self._print_page()
        self._last_words.remove()

    def end_with(self, error: BaseException | None) -> None:
        """The process ends, with an exception where there is one; then no other rank ends before this one does."""
        if error is not None:
            self._ended = described(error, of_script=True)
            # others that waited in vain raise at the same time, and a launcher's SIGTERM follows, to be heard by then
            in_vain = self._loop.begun and any(words in self._ended for words in IN_VAIN)
            self._patience_s = IN_VAIN_S if in_vain else 0.0
            self._at = place_in_script(walk_tb(error.__traceback__))

    def leave_last_words(self) -> None:
        """The process was asked to end (SIGTERM): write what can be written at once. Not on the training thread."""
        loop, self._closed = self._loop, True
        self._patience_s = LAST_PATIENCE_S if loop.world_size <= FEW_RANKS else 0.0
        if not self._ended:
            self._ended, self._at = ASKED, _place()
        loop.messages.events.append({"unix_time_s": time.time(), "text": "the process was asked to end (SIGTERM)"})
        if self._rendezvous is not None and not loop.identity.attempt:
            loop.identity = self._rendezvous.settle(0.1)
        self._housekeeping.stop(EXIT_DEADLINE_S)
        self._print_page()

    def _print_page(self) -> None:
        """On rank 0, once, on whichever thread comes first; nothing without an error stream."""
        has_page = self._loop.rank == 0 and (self._loop.iterations or any(self._told)) and sys.stderr is not None
        if has_page and self._printing.acquire(blocking=False):
            print(self._page or summarise([self.snapshot()]), file=sys.stderr, flush=True)

    def snapshot(self) -> Snapshot:
        """This rank's snapshot (``paceenv.live.record.snapshot``), without reading any file."""
        with self._loop.taking:
            loop, history, options = self._loop, self._loop.history, self._options
            policy, known = loop.policy, loop.identity
            control = self._control.state() if self._control is not None else None  # before the mode, which follows it
            groups = list(loop.log.groups.values())[:MAX_GROUPS]
            started = [loop.log.started(group) for group in groups]
            iterations = loop.iterations + loop.begun  # the first one has no number
            if self._newest[:2] != (iterations, started):
                newest_s = time.monotonic() if self._newest[0] == iterations else loop.log.ticked_s
                self._newest = iterations, started, newest_s
            still_s = time.monotonic() - self._newest[2] if loop.state != "off" else 0.0
            trace = self._recorder.counts if self._recorder else {"rows": 0, "dropped": 0, "segments": 0}
            return {
                "schema": SCHEMA,
                "job": options.job,
                "rank": loop.rank,
                "world_size": loop.world_size,
                "host": self._locality.get("host", ""),
                "attempt": known.attempt,
                "agents": {"count": known.agents, "complete": known.complete, "reason": known.why},
                "unix_time_s": time.time(),
                "final": self._closed,
                "ended": self._ended,
                "at": self._at or (_place() if still_s > 0.5 * STILL_S else ""),
                "mode": loop.options.mode,
                "state": loop.state,
                "reason": loop.reason,
                "iterations": iterations,
                "off": loop.off_iterations,
                "irregular": loop.steps.irregular,
                "still_s": still_s,
                "unmeasured": loop.why_nothing_is_measured(),
                **history.as_dict(),
                "groups": {
                    str(g.number): {"name": g.name, "ranks": g.listed, "member": g.member, "size": g.size, "started": n}
                    for g, n in zip(groups, started, strict=True)
                },
                "unseen": unseen(loop.log.groups, history.count),
                "arrival": ALONE,
                "overhead": {"mean_s": loop.hooks.cost_s},
                "pacing": loop.control.delays() | loop.deferral.counts(),
                **loop.control.snapshot(),
                "stamps": {"dropped": loop.log.stamps.dropped},
                "policy": {"name": policy.policy.name, "source": policy.source, "sha256": policy.sha256},
                "locality": self._locality,
                "trace": trace | {"dropped": trace["dropped"] + loop.history.left_out},
                "control": control,
                "events": list(loop.messages.events),
            }

    def _begin(self) -> None:
        """On the training thread: tell of this rank as soon as it is known, and begin to work with its first tick."""
        loop, options, keep = self._loop, self._options, self._housekeeping
        group = loop.rank, loop.world_size, loop.store
        if self._rendezvous is None:
            self._locality = describe(device="cuda" if "nccl" in loop.backend else "cpu", backend=loop.backend)
            keep.add("the accounts", ACCOUNTS_S, lambda final: loop.catch_up() if loop.begun else None)
            keep.add("the look at SIGTERM", DESCRIPTOR_S, lambda final: loop.at_next_tick(self._last_words.look))
            if options.out is not None:  # early at the end, as a launcher that lost a rank soon kills the others
                write = partial(self._write_status, options.out)
                keep.add("the status", status_period_s(loop.world_size), write, FIRST_STATUS_S)
                keep.add("the trace", 1.0, self._write_trace)
                period_s = max(PAGE_S, PAGE_S_PER_RANK * loop.world_size)
                keep.add("the summary", period_s, partial(self._write_page, options.out))
            keep.start()
        if self._rendezvous is None or group != self._group:  # a script may make another group before its first step
            if self._rendezvous is not None:
                self._rendezvous.settle(0.0)
            loop.identity, self._group = Identity(), group
            own = settings_digest(options, (loop.policy.source, loop.policy.sha256), loop.control.seed)
            self._rendezvous = Rendezvous(loop.rank, loop.world_size, own, self._identified, begun=lambda: loop.begun)
            self._rendezvous.begin(loop.store)
        if not loop.begun:
            return
        self._locality |= {"device": loop.device}
        if options.out is not None:
            self._record(options.out)
        if options.metrics_port is not None:
            self._serve(options.metrics_port)
        if options.kill_file is not None:
            self._watch("the check of the kill file", KILL_FILE_S, partial(self._check_kill_file, options.kill_file))
        period_s, peers = poll_s(loop.world_size), Peers(loop, loop.store)
        others = [("the words of other ranks", period_s, peers.look)]
        if options.out is not None:
            import paceenv.policies.policy_file  # noqa: F401 (the watch thread should import nothing)

            self._control = ControlReader(options.out, loop, peers)
            self._watch("the check of control.json", period_s, self._control.look)
            others += [("who follows control.json", period_s, self._control.agree)]
        if options.mode in DELAYING or (options.out is not None and loop.world_size > 1):
            self._beside(*others)
        self._last_words.install()
        if loop.rank == 0:
            loop.messages.log_once(self._greeting(), level=20)

    def _watch(self, name: str, period_s: float, look: Callable[[bool], None]) -> None:
        """Look for a wish to stop, on a thread of its own: a file system may hang or fail; then nothing is delayed."""
        lively = self._loop.lively
        lively[name] = time.monotonic() + period_s

        def looked(final: bool) -> None:
            look(final)
            lively[name] = time.monotonic() + period_s

        self._beside((name, period_s, looked))

    def _beside(self, *tasks: tuple[str, float, Callable[[bool], None]]) -> None:
        """Run tasks on a thread of their own: a file system or a store may hang."""
        thread = Housekeeping(self._loop.messages.log_once)
        for task in tasks:
            thread.add(*task)
        thread.start()
        self._threads.append(thread)

    def _identified(self, known: Identity) -> None:
        """More is known about this start of the job; any thread."""
        loop = self._loop
        loop.identity = known
        if known.why:
            if loop.rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0":  # else a line of every rank
                loop.messages.log_once(f"{known.why}; nothing is delayed without an agent on every rank")
            if loop.control.decides and loop.state != "shadow":
                loop.downgrade(known.why)

    def _record(self, out: Path) -> None:
        from paceenv.live.record.recorder import TraceRecorder

        loop = self._loop
        job = {"name": self._options.job, "ranks": loop.world_size}
        rank = {"rank": loop.rank, "dp_rank": loop.rank, "stage": 0} | self._locality
        flush_s = max(30.0, status_period_s(loop.world_size))
        self._recorder = TraceRecorder(out, job, rank, flush_s=flush_s)
        loop.history.on_batch = self._recorder.add

    def _write_trace(self, final: bool) -> None:
        if self._recorder is not None:
            self._recorder.attempt = self._loop.identity.attempt
            self._recorder.write(final)

    def _serve(self, port: int) -> None:
        from paceenv.live.record.prometheus import MetricsServer

        # without a launcher's word the script has started its ranks by itself, on one machine
        port += int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or self._loop.rank)
        host = self._options.metrics_host
        self._metrics = MetricsServer(self.measured, port, host=host)
        background(f"metrics on {host}:{port}", self._metrics.start, self._loop.messages.log_once)

    def _write_status(self, out: Path, final: bool) -> None:
        if self._loop.identity.attempt:  # else soon
            if self._told[0]:
                self._loop.catch_up()
            own = self.snapshot() | {"final": final}
            write_status(out, own)
            if self._loop.rank == 0 and not final:
                self._tell_standstill(out, own)

    def _tell_standstill(self, out: Path, own: Snapshot) -> None:
        """Log, once for each standstill, which rank the others wait for, or that steps have stopped for long."""
        longest_s, (iterations, told_s) = number(own, "step", "longest_s") or 0.0, self._told
        said = ""
        if told_s and own["iterations"] > iterations:
            said, self._told = "steps go on" + f"; that one took {duration(longest_s)}" * (longest_s > told_s), (0, 0.0)
        elif not told_s and own["still_s"] > STILL_S:
            others = [one for one in RunFolder(out).statuses(own["attempt"]) if one["rank"] != own["rank"]]
            still = Course(Job([own, *others])).still
            least_s = longest_s if still is not None and still.behind else max(longest_s, SILENT_S)
            early = not own["iterations"] and len(others) + 1 == own["world_size"]  # it may load, or compile
            if still is not None and still.still_s > least_s and (still.behind or not early):
                said, self._told = still.said, (own["iterations"], still.still_s)
        if said:
            self._write_page(out, final=False)  # a log of the script's may hang, too
            background("paceenv-log", partial(self._loop.messages.log_once, said))

    def _write_page(self, out: Path, final: bool) -> None:
        if not self._loop.identity.attempt or self._loop.rank:
            return
        own = self.snapshot() | {"final": final}
        page, findings = write_summary(out, own, self._patience_s if final else 0.0)
        self._page, self._verdicts = page if final else "", findings["verdicts"]

    def measured(self) -> list[Snapshot]:
        """What the metrics serve: the snapshot, and on rank 0 how each rank arrives; reads no file."""
        own = self.snapshot() | {"arrival": None}
        judged = [{"job": own["job"], "rank": int(rank), "arrival": one} for rank, one in self._verdicts.items()]
        return [own, *judged]

    def _check_kill_file(self, file: Path, final: bool) -> None:
        if not final and file.exists():
            self._loop.stop(f"stopped by the kill file {file}")

    def _greeting(self) -> str:
        loop, options = self._loop, self._options
        times = "times by the host's clock" if loop.device == "cpu" else f"times by events on {loop.device}"
        where = f"{loop.world_size} rank{'s' * (loop.world_size > 1)}, {loop.backend or 'no process group'}, {times}"
        files = f", files in {options.out}" if options.out is not None else ""
        probes = f"probes of at most {1e3 * options.probe_s:g} ms, "
        by = {"probe": probes, "observe": ""}.get(options.mode, f"policy {loop.policy.source}, ")
        if loop.policy.candidates:
            by = f"candidates {loop.policy.source.replace(SEPARATOR, ', ')}, "
        return f"mode {loop.state}, {by}{where}{files}"


def _place() -> str:
    """Where the script's main thread is now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return place_in_script(reversed(list(walk_stack(frame))))
