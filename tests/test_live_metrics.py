"""The metrics endpoint over real HTTP."""

from __future__ import annotations

import contextlib
import urllib.request
from pathlib import Path

from commands import DEADLINE_S
from live_samples import run_python, snapshot
from prometheus_client.parser import text_string_to_metric_families

from paceenv.live.record.prometheus import MetricsServer
from paceenv.live.record.snapshot import Snapshot

NUMBERS = {
    *("world_size", "unix_time_seconds", "iterations_total", "step_mean_seconds", "step_cv", "parts_compute_seconds"),
    *("wait_mean_seconds", "arrival_late_seconds", "pacing_asked_total", "pacing_taken_total", "pacing_total_seconds"),
    *("pacing_held_total", "pacing_held_seconds", "canary_gain", "canary_low", "canary_high", "canary_pairs"),
    *("overhead_mean_seconds", "still_seconds", "state", "arrival", "canary"),
}
METRICS = {f"paceenv_live_{name}" for name in NUMBERS}
URL = "http://127.0.0.1:{}/metrics"
Samples = dict[str, dict[tuple[str, ...], float]]


def serving(*snapshots: Snapshot) -> contextlib.closing[MetricsServer]:
    """An endpoint on a free port."""
    server = MetricsServer(lambda: list(snapshots), 0)
    server.start()
    return contextlib.closing(server)


def scrape(snapshot: Snapshot) -> Samples:
    """The samples by name, then by the values of labels beside job and rank."""
    with serving(snapshot) as server, urllib.request.urlopen(URL.format(server.port), timeout=DEADLINE_S) as answer:
        body = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            assert (sample.labels.pop("training_job"), sample.labels.pop("rank")) == ("job", "2")
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_every_number_of_the_snapshot_is_served() -> None:
    samples = scrape(snapshot(2))
    assert set(samples) > METRICS
    assert samples["paceenv_live_step_mean_seconds"] == {(): 0.1}
    assert samples["paceenv_live_pacing_taken_total"] == {(): 590.0}
    assert samples["paceenv_live_pacing_held_total"] == {(): 80.0}
    state = samples["paceenv_live_state"]
    assert (state[("canary",)], sum(state.values()), len(state)) == (1.0, 1.0, 6)


def test_what_is_unknown_has_no_sample() -> None:
    step: dict[str, object] = {"mean_s": float("nan"), "cv": True}
    samples = scrape(snapshot(2, canary=None, wait={"mean_s": None}, step=step, pacing="?"))
    gone = METRICS - set(samples)
    assert {"paceenv_live_step_mean_seconds", "paceenv_live_step_cv", "paceenv_live_canary"} <= gone
    assert all(name.split("_")[2] in {"step", "wait", "canary", "pacing"} for name in gone)


def test_it_listens_on_the_loopback_only() -> None:
    with serving() as server:
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = [entry[1] for entry in listening if entry[1].endswith(f":{server.port:04X}") and entry[3] == "0A"]
        assert mine == [f"0100007F:{server.port:04X}"]


def test_a_forked_child_does_not_keep_the_port() -> None:
    """A worker of a data loader may outlive its rank; the restarted rank wants the port."""
    code = (
        "import os, time; from paceenv.live.record.prometheus import MetricsServer\n"
        "server = MetricsServer(lambda: [], 0)\n"
        "server.start(); port = server.port\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    server.close(); os.write(write, b'.'); time.sleep(60); os._exit(0)\n"
        "os.read(read, 1)\n"
        "server.close()\n"
        "again = MetricsServer(lambda: [], port)\n"
        "again.start(); print(again.port == port); again.close()\n"
        "os.kill(child, 9); os.waitpid(child, 0)\n"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
