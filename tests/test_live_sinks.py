"""Sinks: what they write, where a run is missing or fails, and that the user's own steps stay as they are."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_samples import snapshot
from prometheus_client.parser import text_string_to_metric_families

from paceenv.core.errors import InputError
from paceenv.live.options import SINKS, make_options, parse_sinks
from paceenv.live.record.findings import verdict_of
from paceenv.live.record.housekeeping import Housekeeping
from paceenv.live.sinks.mlflow_run import MlflowRun
from paceenv.live.sinks.open_sinks import open_sinks
from paceenv.live.sinks.otlp import Otlp
from paceenv.live.sinks.sink import SCALARS, scalars
from paceenv.live.sinks.tensorboard_writer import TensorboardWriter
from paceenv.live.sinks.textfile import Textfile
from paceenv.live.sinks.wandb_run import WandbRun

LATE = verdict_of("late", "ranks 0-3 side by side", late_s=0.02, ranks=4)
SNAPSHOT = snapshot(0, arrival=LATE, latest={"rank": 3, "late_s": 0.02})


def test_the_option_lists_sinks() -> None:
    assert parse_sinks("") == {}
    assert parse_sinks("wandb, otlp=http://host:4318,textfile=/var/lib/x") == {
        "wandb": "",
        "otlp": "http://host:4318",
        "textfile": "/var/lib/x",
    }
    assert set(SINKS) == {"textfile", "otlp", "tensorboard", "wandb", "mlflow"}


@pytest.mark.parametrize("text", ["prometheus", "wandb,wandb", "textfile", "textfile=here", "mlflow=x", "wandb=1"])
def test_an_invalid_sink_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"sinks = .*allowed: textfile=/FOLDER, otlp") as raised:
        make_options({"sinks": text}, {})
    assert "\n" not in str(raised.value)


def test_unknown_numbers_are_left_out() -> None:
    assert set(scalars(SNAPSHOT)) == set(SCALARS)
    assert set(scalars(snapshot(0, wait=None))) == set(SCALARS) - {
        "wait_mean_seconds",
        "latest_rank",
        "latest_late_seconds",
    }


def test_the_textfile_is_what_node_exporter_reads(tmp_path: Path) -> None:
    sink = Textfile(str(tmp_path))
    sink.begin()
    for mean_s in (0.1, 0.2):
        sink.write(snapshot(3, job="my job/1", step={"mean_s": mean_s}), False)
    [path] = tmp_path.iterdir()
    assert path.name == "paceenv_my_job_1-e8c6556d_rank00003.prom"
    samples = {s.name: s for family in text_string_to_metric_families(path.read_text()) for s in family.samples}
    assert samples["paceenv_live_step_mean_seconds"].value == 0.2
    assert all(sample.timestamp is None for sample in samples.values())  # that collector refuses timestamps
    sink.write(snapshot(3, job="my job/1"), True)
    assert list(tmp_path.iterdir()) == []


def test_textfiles_of_two_jobs_stay_apart(tmp_path: Path) -> None:
    for job in ("訓練", "学習", "job", "x" * 101, "x" * 102):
        Textfile(str(tmp_path)).write(snapshot(0, job=job), False)
    assert len(list(tmp_path.iterdir())) == 5
    assert (tmp_path / "paceenv_job_rank00000.prom").exists()


class Collector(HTTPServer):
    """Keeps what is posted to it; answers with ``status``."""

    status = 200

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_gauges(collector: Collector) -> None:
    url = f"http://127.0.0.1:{collector.server_port}"
    Otlp(url + "/", {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, x=y"}).write(SNAPSHOT, False)
    [(path, headers, body)] = collector.requests
    assert (path, headers["Content-Type"]) == ("/v1/metrics", "application/json")
    assert {name.lower(): value for name, value in headers.items()}["api-key"] == "a b"
    [resource] = body["resourceMetrics"]
    described = {a["key"]: a["value"]["stringValue"] for a in resource["resource"]["attributes"]}
    assert (described["service.name"], described["host.name"]) == ("job", "node0")
    metrics = {metric["name"]: metric for metric in resource["scopeMetrics"][0]["metrics"]}
    late = metrics["paceenv_live_arrival_late_seconds"]
    assert late["unit"] == "s"
    assert late["gauge"]["dataPoints"] == [
        {
            "timeUnixNano": "1700000000000000000",
            "attributes": [{"key": "rank", "value": {"intValue": "0"}}],
            "asDouble": 0.02,
        }
    ]


def test_a_collector_that_refuses_is_an_error(collector: Collector) -> None:
    collector.status = 503
    with pytest.raises(OSError, match="503"):
        Otlp(f"http://127.0.0.1:{collector.server_port}", {}).write(SNAPSHOT, False)


def test_the_collector_comes_from_the_usual_variables() -> None:
    assert Otlp("", {}).url == "http://localhost:4318/v1/metrics"
    assert Otlp("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://host:1/x"}).url == "https://host:1/x/v1/metrics"
    whole = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://host/m"}
    assert Otlp("", whole).url == "https://host/m"
    assert Otlp("http://mine", whole).url == "http://mine/v1/metrics"
    with pytest.raises(InputError, match="begins with http"):
        Otlp("file:///etc/passwd", {})


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_the_numbers_in_the_users_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    sink = TensorboardWriter()
    with pytest.raises(ValueError, match="no open SummaryWriter"):
        sink.write(SNAPSHOT, False)
    writer = SummaryWriter(str(tmp_path))
    sink = TensorboardWriter()
    writer.add_scalar("loss", 1.0, 7)
    sink.write(SNAPSHOT, False)
    writer.close()
    files = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no open SummaryWriter"):
        sink.write(SNAPSHOT, False)
    sink.write(SNAPSHOT, True)
    assert sorted(tmp_path.iterdir()) == files  # a closed writer is not opened again
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", *(f"paceenv/{name}" for name in SCALARS)}
    [late] = events.Scalars("paceenv/latest_late_seconds")
    assert (late.step, late.value) == (1200, pytest.approx(0.02))
    assert [event.step for event in events.Scalars("loss")] == [7]


class WandbFake:
    """A run as wandb's: ``log`` ends a row and a step, except with ``commit=False``."""

    def __init__(self) -> None:
        self.id, self.step, self.row = "run-1", 0, dict[str, float]()
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        self.row |= data
        if commit is not False:
            self.rows.append(self.row)
            self.row, self.step = {}, self.step + 1


def test_wandb_keeps_the_users_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, module = WandbRun(), SimpleNamespace(run=None)
    with pytest.raises(ValueError, match="no active run"):
        sink.write(SNAPSHOT, False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ValueError, match="no active run"):
        sink.write(SNAPSHOT, False)
    run = module.run = WandbFake()
    run.log({"loss": 1.0})
    sink.write(SNAPSHOT, False)
    sink.write(SNAPSHOT, False)
    run.log({"loss": 0.5})
    assert run.step == 2
    assert run.axes == {"paceenv/iteration": None, "paceenv/*": "paceenv/iteration"}
    assert run.rows[1]["loss"] == 0.5
    assert run.rows[1]["paceenv/iteration"] == 1200
    assert run.rows[1]["paceenv/latest_rank"] == 3
    module.run = None
    sink.write(SNAPSHOT, True)  # finished before the agent's end: nothing to say


def test_mlflow_writes_to_the_run_of_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    active, logged = threading.local(), []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            self.uri = tracking_uri

        def log_batch(self, run_id: str, metrics: list[Any]) -> None:
            logged.append((self.uri, run_id, metrics))

    module = SimpleNamespace(
        active_run=lambda: getattr(active, "run", None),
        get_tracking_uri=lambda: "http://tracking",
        MlflowClient=Client,
        entities=SimpleNamespace(Metric=lambda *fields: fields),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    without = MlflowRun()
    without.begin()
    with pytest.raises(ValueError, match="no active run on the training thread"):
        without.write(SNAPSHOT, False)
    active.run = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    sink = MlflowRun()
    sink.begin()
    thread = threading.Thread(target=sink.write, args=(SNAPSHOT, False))
    thread.start()
    thread.join()
    [(uri, run_id, metrics)] = logged
    assert (uri, run_id) == ("http://tracking", "abc")
    assert ("paceenv/arrival_late_seconds", 0.02, 1_700_000_000_000, 1200) in metrics
    assert len(metrics) == len(SCALARS)


def opened(chosen: dict[str, str], said: list[str], *, rank: int = 0) -> Housekeeping | None:
    return open_sinks(chosen, lambda: snapshot(rank), said.append, rank=rank, world_size=2)


def test_other_ranks_have_no_part_in_the_users_run(tmp_path: Path) -> None:
    said: list[str] = []
    assert opened({"wandb": "", "mlflow": "", "tensorboard": ""}, said, rank=1) is None
    keep = opened({"wandb": "", "textfile": str(tmp_path)}, said, rank=1)
    assert keep is not None
    assert keep.stop(5.0)
    assert said == []


def test_a_sink_that_fails_is_said_once(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    collector.status = 500
    monkeypatch.setattr("paceenv.live.sinks.open_sinks.PERIOD_S", 0.01)
    said: list[str] = []
    keep = opened({"otlp": f"http://127.0.0.1:{collector.server_port}"}, said)
    assert keep is not None
    until_s = time.monotonic() + 30.0
    while len(collector.requests) < 6 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert keep.stop(5.0)
    assert said == ["sink otlp failed: HTTP Error 500: Internal Server Error"]


def test_a_sink_that_cannot_be_opened_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    keep = opened({"otlp": "ftp://host", "textfile": str(tmp_path)}, said)
    assert keep is not None
    assert keep.stop(5.0)
    assert len(said) == 1
    assert said[0].startswith("sink otlp failed: live sinks")
