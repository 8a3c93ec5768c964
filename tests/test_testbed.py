"""The testbed: real namespaces and torchrun jobs, every scenario that ships, nothing left behind by a killed run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_jobs import root_and, run_ranks
from live_testbed_bodies import transfers_of_every_kind
from numpy.typing import NDArray
from typer.testing import CliRunner

from paceenv.core.errors import InputError
from paceenv.core.trace import read_trace
from paceenv.live.testbed import private_namespaces
from paceenv.live.testbed.standing import standing
from paceenv.live.testbed.testbed_network_commands import application
from paceenv.live.testbed.testbed_run import agent_options, run_scenario
from paceenv.live.testbed.testbed_scenario import Compute, Scenario, load_scenario
from paceenv.live.testbed.training_job import TRANSFERS, variation
from paceenv.ui import config_files

ITERATIONS, DEADLINE_S = 12, 300.0
LEFT_AFTER_S = 60.0


def scenario(**changes: Any) -> Scenario:
    """Two hosts on a thin link that reduce and meet, with ``changes``."""
    job = {"name": "pair", "hosts": [0, 1], "iteration": [{"all_reduce": {"bytes": 1e5}}, {"barrier": True}]}
    plain = {
        "name": "tiny",
        "network": {"hosts": 2, "host_mbps": 20},
        "jobs": [job],
        "loop": {"job": "pair", "expect": "neutral"},
    }
    return config_files.parse(Scenario, plain | changes, "test")


@pytest.mark.slow
@pytest.mark.parametrize("name", config_files.names("testbed"))
def test_every_scenario_runs_under_the_agent(name: str, tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    chosen = load_scenario(name)
    main = chosen.job(chosen.loop.job)
    agents = {main.name: agent_options(chosen.loop, "observe")}
    result = run_scenario(chosen, tmp_path / "run", agents=agents, iterations=ITERATIONS, deadline_s=DEADLINE_S)
    mine = result.jobs[main.name]
    assert mine.exit_codes == (0,) * len(main.hosts)
    assert mine.steps_s_TR.shape == (ITERATIONS, main.ranks)
    assert (np.diff(mine.steps_s_TR, axis=0) > 0.0).all()
    least_s = sum(phase.compute.mean_s for phase in main.iteration if phase.compute and not phase.compute.ranks)
    assert mine.step_s_T.mean() > 0.8 * least_s
    assert [snapshot["rank"] for snapshot in mine.snapshots] == list(range(main.ranks))
    assert all(snapshot["state"] == "observe" and snapshot["final"] for snapshot in mine.snapshots)
    assert mine.trace is not None
    trace = read_trace(mine.trace)
    kinds = {next(iter(phase.model_fields_set)) for phase in main.iteration}
    assert kinds - {"compute"} <= set(trace.column("op"))
    assert set(trace.column("rank")) == set(range(main.ranks))
    for other in set(result.jobs) - {main.name}:  # they began before the main one, and went on until it ended
        steps_s = result.jobs[other].steps_s_TR.max(axis=1)
        assert steps_s[0] < mine.steps_s_TR.min()
        assert steps_s[-1] > mine.steps_s_TR[-2].max()
    assert not list((tmp_path / "run").rglob("torchelastic_*"))


@pytest.mark.slow
def test_a_background_transfer_runs_beside_the_compute_behind_it(tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    step_s = {}
    for background in (False, True):
        transfer = {"bytes": 4e5, "communicator": "gradients", "background": background}  # 160 ms at 20 Mbit/s
        job = {"name": "pair", "hosts": [0, 1], "iteration": [{"all_reduce": transfer}, {"compute": {"mean_s": 0.15}}]}
        result = run_scenario(scenario(jobs=[job]), tmp_path / str(background), iterations=10, deadline_s=DEADLINE_S)
        step_s[background] = float(np.median(result.jobs["pair"].step_s_T))
    assert step_s[False] > 0.29
    assert 0.15 < step_s[True] < 0.8 * step_s[False]


def test_only_a_collective_runs_in_the_background() -> None:
    job = {"name": "pair", "hosts": [0, 1], "iteration": [{"send": {"bytes": 1e5, "background": True}}]}
    with pytest.raises(InputError, match="send without background: only a collective"):
        scenario(jobs=[job])


def test_a_thin_link_takes_the_time_it_must(tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    one_is_thin = {"hosts": 2, "host_mbps": 1000, "host_mbps_of": {1: 20}}
    iteration = [{"all_reduce": {"bytes": 1e5}}, {"checkpoint": {"every": 3, "seconds": 0.05, "ranks": [0]}}]
    chosen = scenario(network=one_is_thin, jobs=[{"name": "pair", "hosts": [0, 1], "iteration": iteration}])
    agents = {"pair": agent_options(chosen.loop, "observe")}
    result = run_scenario(chosen, tmp_path / "run", agents=agents, iterations=7, deadline_s=DEADLINE_S).jobs["pair"]
    # two ranks exchange 100 kB at 20 Mbit/s; what fits into the bucket goes at once
    assert np.median(result.step_s_T) > 0.9 * (1e5 - 16_384) * 8 / 20e6
    assert result.trace is not None
    trace = read_trace(result.trace)
    written = trace.isin("op", "checkpoint")
    assert set(trace.column("rank")[written]) == {0}
    assert trace.column("iteration")[written].tolist() == [
        2,
        5,
    ]  # from the first whole one on
    assert ((trace.column("end_s") - trace.column("start_s"))[written] > 0.05).all()


def test_emulated_compute_varies_as_it_is_told() -> None:
    compute = {"mean_s": 0.1, "imbalance_cv": 0.2}
    drawn = _drawn(compute, 20_000)
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)
    assert drawn.std() == pytest.approx(0.2, rel=0.03)
    assert ((drawn - 1.0) ** 3).mean() / drawn.std() ** 3 == pytest.approx(1.0, abs=0.15)
    wanders = _drawn({"mean_s": 0.1, "drift_cv": 0.1, "drift_iterations": 15}, 20_000)
    x = wanders - wanders.mean()
    assert wanders.std() == pytest.approx(0.1, rel=0.1)
    assert (x[15:] * x[:-15]).mean() / x.var() == pytest.approx(np.exp(-1.0), abs=0.1)


def _drawn(compute: dict[str, Any], count: int) -> NDArray[np.float64]:
    draw = variation(Compute(**compute).model_dump(), np.random.default_rng(1), np.random.default_rng(2))
    return np.array([draw() for _ in range(count)])


@pytest.mark.alone
def test_a_step_ends_before_the_delay_of_the_next(tmp_path: Path) -> None:
    """Both ranks leave the barrier together, however long one of them is then held back."""
    root_and("ip", "tc", "unshare", "setpriv")
    iteration = [{"compute": {"mean_s": 0.1}}, {"all_reduce": {"bytes": 1e4}}, {"barrier": True}]
    chosen = scenario(jobs=[{"name": "pair", "hosts": [0, 1], "iteration": iteration}])
    last_place = ["--policy", "static:mechanism=stagger,threshold=0,window=0.4"]  # the second rank, in every step
    limits = ["--cap-s", "0.2", "--cap-share", "0.5", "--budget-s-per-minute", "30", "--quiet-first", "1"]
    agent = ["--mode", "active", "--interval-iterations", "2", "--block-iterations", "6", *last_place, *limits]
    result = run_scenario(chosen, tmp_path / "run", agents={"pair": agent}, iterations=40, deadline_s=DEADLINE_S)
    pair = result.jobs["pair"]
    assert pair.trace is not None
    trace = read_trace(pair.trace)
    paced = trace.isin("op", "pace")
    assert set(trace.column("rank")[paced]) == {1}
    delays_s = (trace.column("end_s") - trace.column("start_s"))[paced]
    apart_s = np.abs(np.diff(pair.steps_s_TR, axis=1))
    assert len(delays_s) >= 10
    assert np.median(apart_s) < 0.25 * np.median(delays_s)


def test_a_job_that_fails_is_one_line_with_its_reason(tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    with pytest.raises(InputError, match=r"job pair failed: .*mode = 'everything'"):
        run_scenario(
            scenario(), tmp_path / "run", agents={"pair": ["--mode", "everything"]}, iterations=4, deadline_s=DEADLINE_S
        )


def _holding(folder: Path) -> list[int]:
    """Processes that have ``folder`` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _network_namespaces(processes: Iterable[int | str]) -> set[str]:
    """Network namespaces of processes; those of nobody's processes are gone with their names, which are private."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{process}/ns/net"))
    return found


def _everybody() -> list[str]:
    return [entry.name for entry in Path("/proc").glob("[0-9]*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGINT,
    ],
)
def test_a_killed_run_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    links, spaces = _links(), set[str]()
    file, out = tmp_path / "tiny.yaml", tmp_path / "run"
    config_files.write_yaml(file, scenario().model_dump(exclude_unset=True))
    program = (
        "import sys; from paceenv.live.testbed.testbed_network_commands import application; application(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "run", str(file), "-o", str(out), "--iterations", "100000"]
    with (tmp_path / "output").open("wb") as output:
        # a job that a shell put into the background ignores SIGINT, and so would everything it starts
        heard = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, stdout=output, stderr=output)
        signal.signal(signal.SIGINT, heard)
        try:
            until_s = time.monotonic() + DEADLINE_S
            while not any(path.stat().st_size for path in out.glob("pair/steps/*")):
                assert time.monotonic() < until_s, (tmp_path / "output").read_text()
                assert process.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.1)
            assert len(_holding(out)) > 4  # unshare, the first process, torchrun and ranks of two hosts
            spaces = _network_namespaces(_holding(out)) - _network_namespaces(["self"])
            assert len(spaces) == 3  # racks and spine, and a host each
            assert _links() == links
        finally:
            process.send_signal(number)
            process.wait(DEADLINE_S)
    until_s = time.monotonic() + LEFT_AFTER_S
    while _holding(out) or _network_namespaces(_everybody()) & spaces:
        assert time.monotonic() < until_s, _holding(out)
        time.sleep(0.05)
    assert _links() == links


def _links() -> list[Any]:
    """Interfaces of our own namespace, as iproute2 tells them."""
    told = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
    return sorted(link["ifname"] for link in told)


@pytest.fixture
def tiny_up(tmp_path: Path) -> Iterator[str]:
    root_and("ip", "tc", "unshare", "setpriv", "nsenter")
    name = f"test-{os.getpid()}"
    file = tmp_path / "tiny.yaml"
    config_files.write_yaml(file, scenario(name=name).model_dump(exclude_unset=True))
    links = _links()
    done = CliRunner().invoke(application, ["up", str(file)])
    assert done.exit_code == 0, done.output
    yield name
    CliRunner().invoke(application, ["down", name])
    assert name not in {one.name for one in standing()}
    assert _links() == links


def test_a_testbed_stays_up_until_it_is_taken_down(tiny_up: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert tiny_up in {one.name for one in standing()}
    reach = "import socket; s = socket.create_server(('10.77.0.2', 0)); print(s.getsockname()[0])"
    done = CliRunner().invoke(application, ["exec", "--on", tiny_up, "1", "--", sys.executable, "-c", reach])
    assert done.exit_code == 0
    assert capfd.readouterr().out.strip() == "10.77.0.2"
    assert CliRunner().invoke(application, ["exec", "--on", tiny_up, "1", "--", "sh", "-c", "exit 7"]).exit_code == 7
    with pytest.raises(InputError, match="host = 2; allowed: 0 to 1"):
        CliRunner().invoke(application, ["exec", "--on", tiny_up, "2", "--", "true"], catch_exceptions=False)
    (one,) = (one for one in standing() if one.name == tiny_up)
    os.kill(one.pid, signal.SIGKILL)
    until_s = time.monotonic() + LEFT_AFTER_S
    while any(one.name == tiny_up for one in standing()):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(
        private_namespaces.shutil, "which", lambda tool: None if tool in {"ip", "tc"} else f"/bin/{tool}"
    )
    with pytest.raises(InputError, match=r"missing: ip \(apt-get install iproute2\), tc .*, root's rights"):
        run_scenario(scenario(), tmp_path / "run", iterations=4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"network": {"hosts": 2, "racks": 2}}, "uplink_mbps with several racks"),
        ({"network": {"hosts": 2, "host_mbps": 0}}, "network.host_mbps"),
        ({"network": {"hosts": 1}}, "network.hosts"),
        ({"network": {"hosts": 2, "host_mbps_of": {2: 10}}}, "hosts of host_mbps_of from 0 to 1"),
        ({"jobs": [{"name": "pair", "hosts": [0, 5], "iteration": [{"barrier": True}]}]}, "hosts of a job from 0 to 1"),
        ({"jobs": [{"name": "pair", "hosts": [0, 1], "iteration": [{"barrier": False}]}]}, "barrier: true"),
        ({"jobs": [{"name": "pair", "hosts": [0, 1], "iteration": []}]}, "either iteration or model"),
        (
            {"jobs": [{"name": "pair", "hosts": [0, 1], "iteration": [{"gather": {"bytes": 8, "group_size": 4}}]}]},
            "group_size that divides the 2 ranks",
        ),
        ({"loop": {"job": "other", "expect": "helps"}}, "loop.job one of pair"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        scenario(**changes)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(InputError, match="already exists; allowed: a new or an empty folder"):
        run_scenario(scenario(), tmp_path, iterations=4)
    assert (tmp_path / "kept").read_text() == "mine"


def test_every_kind_of_transfer_in_groups_of_either_shape(tmp_path: Path) -> None:
    ended = run_ranks(transfers_of_every_kind, 4, tmp_path)
    assert [rank.result for rank in ended] == [sorted(TRANSFERS)] * 4


@pytest.mark.slow
def test_a_training_of_a_real_model_is_the_same_with_and_without_the_agent(tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    model = {"name": "pair", "hosts": [0, 1], "model": {"width": 32, "layers": 2}}
    said = []
    for mode in (None, "canary"):
        chosen = scenario(jobs=[model], network={"hosts": 2})
        options = [*agent_options(chosen.loop, mode), "--policy", "adaptive"] if mode else None
        agents = {"pair": options} if options else {}
        out = tmp_path / str(mode)
        run_scenario(chosen, out, agents=agents, iterations=80, deadline_s=DEADLINE_S)
        log = (out / "pair" / "log" / "host0.txt").read_text().splitlines()
        said.append([line for line in log if line.startswith("iteration ")])
    assert len(said[0]) == 4
    assert said[0] == said[1]
