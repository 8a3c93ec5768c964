"""Metrics to an OpenTelemetry collector: OTLP as JSON over HTTP, one request for each write.

The standard library is enough. The SDK would bring its own threads, exporters and protobuf into every rank of the job,
for eight gauges every ten seconds. The variables that the SDK knows are followed: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_EXPORTER_OTLP_METRICS_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from paceenv.core.errors import out_of_range
from paceenv.live.record.snapshot import Snapshot, entry, number, text
from paceenv.live.sinks.sink import scalars

DEFAULT: Final = "http://localhost:4318"
PATH: Final = "/v1/metrics"
TIMEOUT_S: Final = 5.0


class Otlp:
    """Posts the numbers of this rank to a collector.

    Args:
        url: the collector, without the path; "" takes it from the environment, else :data:`DEFAULT`.
        environ: environment variables.

    Raises:
        InputError: an address that is neither http nor https.
    """

    def __init__(self, url: str = "", environ: Mapping[str, str] = os.environ) -> None:
        whole = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "")
        base = url or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or DEFAULT
        self.url = whole if whole and not url else base.rstrip("/") + PATH
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise out_of_range("otlp", self.url, "an address that begins with http:// or https://", "live sinks")
        pairs = (
            pair.partition("=") for pair in environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if "=" in pair
        )
        self._headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}

    def begin(self) -> None:
        """Nothing to note."""

    def write(self, snapshot: Snapshot, final: bool) -> None:
        """Send the numbers. Raises OSError where the collector does not take them.

        Args:
            snapshot: of this rank.
            final: whether it is the last one.
        """
        body = json.dumps(payload(snapshot), allow_nan=False).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read(1024)


def payload(snapshot: Snapshot) -> dict[str, Any]:
    """The request's body: an ``ExportMetricsServiceRequest`` in OTLP's JSON encoding."""
    nanoseconds = str(int(1e9 * (number(snapshot, "unix_time_s") or 0.0)))  # 64-bit integers are strings in this JSON
    point = {"timeUnixNano": nanoseconds, "attributes": [{"key": "rank", "value": {"intValue": str(snapshot["rank"])}}]}
    metrics = [
        {
            "name": f"paceenv_live_{name}",
            "unit": "s" if name.endswith("_seconds") else "1",
            "gauge": {"dataPoints": [point | {"asDouble": value}]},
        }
        for name, value in scalars(snapshot).items()
    ]
    described = {
        "service.name": text(snapshot, "job"),
        "service.instance.id": f"{entry(snapshot, 'attempt')}/{snapshot['rank']}",
        "host.name": text(snapshot, "host"),
    }
    resource = [{"key": key, "value": {"stringValue": value}} for key, value in described.items()]
    scope = {"scope": {"name": "paceenv.live"}, "metrics": metrics}
    return {"resourceMetrics": [{"resource": {"attributes": resource}, "scopeMetrics": [scope]}]}
