"""The Prometheus endpoint of a rank: its last snapshot as metrics over HTTP, by default on the loopback.

Metrics are made on request, on a thread of the server; nothing is added to an iteration. The server has its own
registry, separate from the job's own Prometheus metrics. A port in use is reported once, and the job goes on without.
Names and units are in :data:`METRICS`; the dashboard in ``live/dashboards`` queries them.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import socketserver
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from paceenv.live.record.housekeeping import background, describe
from paceenv.live.record.snapshot import ARRIVALS, PARTS, STATES, UNKNOWN, VERDICTS, Snapshot, entry, number, text

END_S: Final = 1.0
"""Longest wait for the end of an endpoint."""
PREFIX: Final = "paceenv_live_"
LABELS: Final = ("training_job", "rank")
"""Not ``job``: Prometheus uses that label itself, for the name of its scrape configuration."""
RESTS_ON: Final = ("evidence", "ranks", "iterations", "age_s")
"""What a verdict on arrival rests on."""
REQUEST_TIMEOUT_S: Final = 10.0
"""A silent client is disconnected after this time."""


@dataclass(frozen=True)
class Quantity:
    """A number of the snapshot as a metric; a counter's exported name ends in ``_total``."""

    name: str
    help: str
    path: tuple[str, ...]
    counter: bool = False


QUANTITIES: Final = (
    Quantity("ranks", "Ranks of the job.", ("world_size",)),
    Quantity("snapshot_timestamp_seconds", "When these numbers were taken, Unix time.", ("unix_time_s",)),
    Quantity("iterations", "Iterations seen.", ("iterations",), True),
    Quantity("irregular_iterations", "Iterations unlike the usual, not estimated from.", ("irregular",), True),
    Quantity("step_mean_seconds", "Mean step time.", ("step", "mean_s")),
    Quantity("step_p50_seconds", "Median step time.", ("step", "p50_s")),
    Quantity("step_p99_seconds", "99th percentile of step time.", ("step", "p99_s")),
    Quantity("step_baseline_seconds", "Step time at its best, with long memory.", ("step", "baseline_s")),
    Quantity("step_cv_ratio", "Standard deviation of step time / mean.", ("step", "cv")),
    Quantity("wait_mean_seconds", "Mean wait for other ranks in the step's last collective.", ("wait", "mean_s")),
    Quantity("wait_p50_seconds", "Median wait for other ranks.", ("wait", "p50_s")),
    Quantity("wait_p95_seconds", "95th percentile of the wait for other ranks.", ("wait", "p95_s")),
    Quantity("wait_baseline_seconds", "The last collective's duration without waiting.", ("wait", "baseline_s")),
    Quantity("arrival_early_seconds", "How early this rank arrives.", ("arrival", "early_s")),
    Quantity("arrival_late_seconds", "How late this rank arrives.", ("arrival", "late_s")),
    Quantity("arrival_share_ratio", "Share of the compared blocks in which it is late.", ("arrival", "share")),
    Quantity("arrival_ranks", "Ranks that were compared for the verdict on arrival.", ("arrival", "ranks")),
    Quantity("arrival_iterations", "Iterations that were compared for it.", ("arrival", "iterations")),
    Quantity("arrival_age_seconds", "Age of the snapshots that it rests on.", ("arrival", "age_s")),
    Quantity("delays_asked", "Delays the policy asked for.", ("pacing", "asked"), True),
    Quantity("delays_taken", "Delays taken.", ("pacing", "taken"), True),
    Quantity("delays_ineffective", "Delays taken that moved nothing.", ("pacing", "ineffective"), True),
    Quantity("delay_seconds", "Time spent in delays.", ("pacing", "total_s"), True),
    Quantity("delay_mean_seconds", "Mean delay.", ("pacing", "mean_s")),
    Quantity("delay_max_seconds", "Longest delay.", ("pacing", "max_s")),
    Quantity("transfers_held", "Transfers that rule defer held back.", ("pacing", "held"), True),
    Quantity("hold_seconds", "Time by which held transfers started later, summed.", ("pacing", "held_s"), True),
    Quantity("hold_max_seconds", "Longest time that a transfer was held back.", ("pacing", "held_max_s")),
    Quantity("canary_gain_ratio", "Fall of the mean step time by pacing, relative.", ("canary", "gain")),
    Quantity("canary_gain_low_ratio", "Lower end of its interval.", ("canary", "low")),
    Quantity("canary_gain_high_ratio", "Upper end of its interval.", ("canary", "high")),
    Quantity("canary_pairs", "Pairs of blocks with and without pacing that were compared.", ("canary", "pairs")),
    Quantity("tune_loss_ratio", "Share of the search's time lost against no pacing.", ("tune", "loss_share")),
    Quantity("tune_left_iterations", "Iterations that the search lasts at most.", ("tune", "left_iterations")),
    Quantity("tune_searches", "Searches that have ended.", ("tune", "searches"), True),
    Quantity("overhead_mean_seconds", "The agent's own time on the host per iteration.", ("overhead", "mean_s")),
    Quantity("overhead_p99_seconds", "99th percentile of the same.", ("overhead", "p99_s")),
    Quantity("trace_rows", "Rows of the trace written.", ("trace", "rows"), True),
    Quantity("trace_segments", "Segments of the trace written.", ("trace", "segments"), True),
    Quantity("trace_dropped_iterations", "Iterations missing from the trace.", ("trace", "dropped"), True),
)


@dataclass(frozen=True)
class Choice:
    """A word of the snapshot as one metric per possible word: 1 for the current one, 0 for the others."""

    name: str
    help: str
    label: str
    path: tuple[str, ...]
    words: tuple[str, ...]


CHOICES: Final = (
    Choice("state", "The mode in force.", "state", ("state",), STATES),
    Choice("arrival", "How this rank arrives at the collective.", "verdict", ("arrival", "verdict"), ARRIVALS),
    Choice(
        "canary", "Verdict of comparing blocks with and without pacing.", "verdict", ("canary", "verdict"), VERDICTS
    ),
)
CANDIDATES: Final = {
    "gain_ratio": "Fall of the mean step time by a candidate of mode tune, relative.",
    "gain_low_ratio": "Lower end of its interval.",
    "gain_high_ratio": "Upper end of its interval.",
    "pairs": "Pairs of blocks in which it was compared.",
    "in": "Whether it is still in the search.",
    "winner": "Whether it is deployed.",
}
METRICS: Final = tuple(
    PREFIX + name
    for name in (
        *(quantity.name + ("_total" if quantity.counter else "") for quantity in QUANTITIES),
        *(choice.name for choice in CHOICES),
        *(f"tune_{name}" for name in CANDIDATES),
        "part_seconds",
        "arrival_evidence_info",
        "agent_info",
    )
)
"""The names as they are exported."""


class SnapshotCollector(Collector):
    """Turns a snapshot into metrics; unknown numbers have no sample. Without a snapshot there are no metrics."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        try:
            snapshot = self._snapshot()
        except Exception:  # the agent reports its own errors; the endpoint stays silent
            snapshot = None
        if snapshot is not None:
            yield from _families(_without_lone_claims(snapshot))


def _without_lone_claims(snapshot: Snapshot) -> Snapshot:
    """A rank's own times cannot show that it is early or late: without a second rank there is no such claim."""
    if text(snapshot, "arrival", "verdict") == UNKNOWN:
        kept = {"verdict": UNKNOWN, **{name: entry(snapshot, "arrival", name) for name in RESTS_ON}}
    elif (number(snapshot, "arrival", "ranks") or 0.0) >= 2.0:
        return snapshot
    else:
        kept = {"verdict": UNKNOWN, "evidence": "one rank alone", "ranks": 1}
    return snapshot | {"arrival": kept}


def _families(snapshot: Snapshot) -> Iterator[Metric]:
    whose = [text(snapshot, "job"), str(entry(snapshot, "rank"))]
    for quantity in QUANTITIES:
        value = number(snapshot, *quantity.path)
        if value is not None:
            kind = CounterMetricFamily if quantity.counter else GaugeMetricFamily
            family = kind(PREFIX + quantity.name, quantity.help, labels=LABELS)
            family.add_metric(whose, value)
            yield family
    parts = GaugeMetricFamily(PREFIX + "part_seconds", "Where the mean step went.", labels=(*LABELS, "part"))
    for part in PARTS:
        value = number(snapshot, "parts", f"{part}_s")
        if value is not None:
            parts.add_metric([*whose, part], value)
    yield parts
    for choice in CHOICES:
        word = text(snapshot, *choice.path)
        if word:
            words = choice.words if word in choice.words else (*choice.words, word)
            family = GaugeMetricFamily(PREFIX + choice.name, choice.help, labels=(*LABELS, choice.label))
            for possible in words:
                family.add_metric([*whose, possible], float(possible == word))
            yield family
    yield from _candidates(snapshot, whose)
    evidence = InfoMetricFamily(PREFIX + "arrival_evidence", "What the verdict on arrival rests on.", labels=LABELS)
    evidence.add_metric(whose, {"evidence": text(snapshot, "arrival", "evidence")})
    yield evidence
    info = InfoMetricFamily(PREFIX + "agent", "Who reports.", labels=LABELS)
    described = {name: text(snapshot, name) for name in ("host", "attempt", "mode")}
    info.add_metric(whose, described | {"policy": text(snapshot, "policy", "name")})
    yield info


def _candidates(snapshot: Snapshot, whose: list[str]) -> Iterator[Metric]:
    """The candidates of mode tune, on rank 0."""
    candidates = entry(snapshot, "tune", "candidates")
    if not isinstance(candidates, list):
        return
    for name, help_ in CANDIDATES.items():
        family = GaugeMetricFamily(f"{PREFIX}tune_{name}", help_, labels=(*LABELS, "candidate"))
        for one in candidates:
            known: dict[str, float | None] = {
                "gain_ratio": number(one, "gain"),
                "gain_low_ratio": number(one, "low"),
                "gain_high_ratio": number(one, "high"),
                "pairs": number(one, "pairs"),
                "in": float(not text(one, "dropped")),
                "winner": float(text(one, "name") == text(snapshot, "tune", "winner")),
            }
            value = known[name]
            if value is not None:
                family.add_metric([*whose, text(one, "name")], value)
        yield family


class MetricsServer:
    """Serves the metrics of a snapshot over HTTP until :meth:`close`.

    ``start`` may take as long as the system's resolver and belongs on a background thread.

    Args:
        snapshot: makes the snapshot, or None.
        problem: called once with one line if the endpoint cannot be started.

    Raises:
        ValueError: ``port`` out of range.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        port: int,
        *,
        host: str = "127.0.0.1",
        problem: Callable[[str], None],
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"metrics port = {port!r}; allowed: 0 to 65535")
        self._asked, self._problem = (host, port), problem
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SnapshotCollector(snapshot))
        self._server: _Server | None = None

    @property
    def port(self) -> int | None:
        """The port it listens on; None while it does not."""
        return self._server.server_port if self._server is not None else None

    def start(self) -> bool:
        """Listen and serve; False, with a report to ``problem``, where that is not possible."""
        host, port = self._asked
        server: _Server | None = None
        try:
            server = _Server(host, port)
            server.set_app(make_wsgi_app(self._registry))
            server.thread.start()
        except Exception as error:
            if server is not None:
                server.server_close()
            with contextlib.suppress(Exception):
                self._problem(f"no metrics on {host}:{port}: {describe(error)}")
            return False
        self._server = server
        return True

    def close(self) -> None:
        """Stop listening; requests under way are not finished."""
        server, self._server = self._server, None
        if server is not None and os.getpid() == server.process:
            server.end()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def get_stderr(self) -> TextIO:
        """Discard the library's reports of request errors: the error stream belongs to the job."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing to the job's error stream."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.process = os.getpid()
        self.server_name, self.address_family = host, socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.thread = background("paceenv-metrics", self.serve)
        self._ending = False
        _release_in_children(weakref.ref(self))

    def serve(self) -> None:
        """Answer until :meth:`end` and sleep in between: ``serve_forever`` would wake up twice a second."""
        while not self._ending:
            self.handle_request()

    def end(self) -> None:
        """Stop answering and release the port."""
        self._ending = True
        self.socket.shutdown(socket.SHUT_RDWR)  # on Linux this wakes the thread that waits for a connection
        self.thread.join(END_S)
        self.server_close()

    def server_bind(self) -> None:
        """Bind without asking the resolver for our own full name: the library does, and it may take minutes."""
        socketserver.TCPServer.server_bind(self)
        self.server_port = self.socket.getsockname()[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that goes away in the middle."""


def _release_in_children(reference: weakref.ref[_Server]) -> None:
    """Close the port in a forked child: otherwise it stays in use for as long as the child lives."""

    def release() -> None:
        server = reference()
        if server is not None:
            server.socket.close()

    os.register_at_fork(after_in_child=release)
