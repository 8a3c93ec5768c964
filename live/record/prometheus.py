"""The Prometheus endpoint of a rank: its last snapshot as metrics over HTTP, by default on the loopback.

That of rank 0 says of all ranks who is late.
Metrics are made on request, on a thread of the server; nothing is added to an iteration. The server has its own
registry, separate from the job's own Prometheus metrics. A port in use is reported once, and the job goes on without.
A metric's name is that of the number in the snapshot: ``step.mean_s`` is ``paceenv_live_step_mean_seconds``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.registry import Collector

from paceenv.live.options import MODES
from paceenv.live.record.snapshot import ARRIVALS, VERDICTS, Snapshot, entry, number, text

PREFIX: Final = "paceenv_live_"
LABELS: Final = ("training_job", "rank")
"""Not ``job``: Prometheus uses that label itself, for the name of its scrape configuration."""
SERVED: Final = ("step", "parts", "wait", "arrival", "pacing", "canary", "overhead")
"""Fields of the snapshot whose numbers are served, beside :data:`WHOLE`."""
WHOLE: Final = ("world_size", "unix_time_s", "iterations", "still_s")
COUNTERS: Final = {"iterations", "pacing_asked", "pacing_taken", "pacing_held"}
CHOICES: Final = (
    ("state", "The mode in force.", ("state",), MODES),
    ("arrival", "How this rank arrives at the collective.", ("arrival", "verdict"), ARRIVALS),
    ("canary", "Verdict of comparing blocks with and without pacing.", ("canary", "verdict"), VERDICTS),
)
"""Words of the snapshot, each as a set of states: 1 for the current word, 0 for the others."""


def _numbers(snapshot: Snapshot) -> dict[str, float]:
    """The numbers that are served, by name."""
    paths = [(name,) for name in WHOLE] + [(field, name) for field in SERVED for name in entry(snapshot, field) or ()]
    found = {"_".join(path): number(snapshot, *path) for path in paths}
    return {re.sub("_s$", "_seconds", name): value for name, value in found.items() if value is not None}


class MetricsServer(Collector):
    """Serves the metrics of snapshots over HTTP until :meth:`close`, through the library's own server.

    ``start`` may take as long as the system's resolver and belongs on a background thread.
    """

    def __init__(self, snapshots: Callable[[], Sequence[Snapshot]], port: int, *, host: str = "127.0.0.1") -> None:
        self._snapshots, self._asked, self._process = snapshots, (host, port), os.getpid()
        self._server: Any = None

    @property
    def port(self) -> int | None:
        """The port it listens on; None while it does not."""
        return self._server.server_port if self._server is not None else None

    def collect(self) -> Iterator[Metric]:
        """The metrics of the present snapshots; unknown numbers have no sample."""
        with contextlib.suppress(Exception):  # the agent reports its own errors; the endpoint stays silent
            families: dict[str, Any] = {}
            for one in self._snapshots():
                whose = [text(one, "job"), str(entry(one, "rank"))]
                for name, value in _numbers(one).items():
                    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                    family = families.setdefault(name, kind(PREFIX + name, name.replace("_", " "), labels=LABELS))
                    family.add_metric(whose, value)
                for name, meaning, path, words in CHOICES:
                    if word := text(one, *path):
                        states = StateSetMetricFamily(PREFIX + name, meaning, labels=LABELS)
                        states = families.setdefault(name, states)
                        states.add_metric(whose, {possible: possible == word for possible in words})
            yield from families.values()

    def start(self) -> None:
        """Listen and serve. Raises OSError where that is not possible."""
        (host, port), registry = self._asked, CollectorRegistry(auto_describe=False)
        registry.register(self)
        server: Any = start_http_server(port, host, registry)[0]
        server.handle_error = lambda request, address: None  # a client that goes away in the middle
        handler = server.RequestHandlerClass
        server.RequestHandlerClass = type(handler.__name__, (handler,), {"timeout": 10.0})  # of a silent client
        self._server = server
        os.register_at_fork(after_in_child=server.socket.close)  # else the port is in use as long as the child lives

    def close(self) -> None:
        """Stop listening; requests under way are not finished."""
        server, self._server = self._server, None
        if server is not None and os.getpid() == self._process:
            server.shutdown()  # within half a second
            server.server_close()
