"""The testbed: real namespaces and jobs, every scenario that ships, nothing left behind by a killed run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from live_jobs import root_and, run_ranks

from paceenv.cli.application import run as paceenv
from paceenv.core.errors import InputError
from paceenv.core.trace import read_trace
from paceenv.live.testbed import testbed_run
from paceenv.live.testbed.testbed_run import agent_options, run_scenario
from paceenv.live.testbed.testbed_scenario import Job, Scenario, load_scenario
from paceenv.live.testbed.training_job import emulated_step
from paceenv.ui import config_files

ITERATIONS, DEADLINE_S = 8, 300.0
BARRIER = {"all_reduce": {"bytes": 0}}
HELD = {"bytes": 8, "background": True, "can_wait": True}
LEFT_AFTER_S = 60.0


def scenario(**changes: Any) -> Scenario:
    """Two hosts on a thin link that reduce and meet, with ``changes``."""
    job = {"name": "pair", "hosts": [0, 1], "program": {"step": [{"all_reduce": {"bytes": 1e5}}, BARRIER]}}
    plain = {"name": "tiny", "network": {"hosts": 2, "host_mbps": 20}, "jobs": [job]}
    plain |= {"loop": {"job": "pair", "expect": "neutral"}}
    return config_files.parse(Scenario, plain | changes, "test")


@pytest.mark.slow
def test_a_scenario_of_two_jobs_runs_under_the_agent(tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    chosen = load_scenario("two-jobs")
    main = chosen.job(chosen.loop.job)
    agents = {main.name: agent_options(chosen.loop, "observe")}
    result = run_scenario(chosen, tmp_path / "run", agents=agents, iterations=ITERATIONS, deadline_s=DEADLINE_S)
    mine = result[main.name]
    assert mine.steps_s_TR.shape == (ITERATIONS, main.ranks)
    assert (np.diff(mine.steps_s_TR, axis=0) > 0.0).all()
    assert mine.step_s_T.mean() > 0.8 * main.plan.compute_s
    assert [snapshot["rank"] for snapshot in mine.snapshots] == list(range(main.ranks))
    assert all(snapshot["state"] == "observe" and snapshot["final"] for snapshot in mine.snapshots)
    assert mine.trace is not None
    trace = read_trace(mine.trace)
    assert {one.op for one in main.starts} <= set(trace.column("op"))
    assert set(trace.column("rank")) == set(range(main.ranks))
    for other in set(result) - {main.name}:  # they began before the main one, and went on until it ended
        steps_s = result[other].steps_s_TR.max(axis=1)
        assert steps_s[0] < mine.steps_s_TR.min()
        assert steps_s[-1] > mine.steps_s_TR[-2].max()
    assert not list((tmp_path / "run").rglob("torchelastic_*"))


@pytest.mark.alone
def test_a_step_ends_before_the_delay_of_the_next(tmp_path: Path) -> None:
    """Both ranks leave the barrier together, however long one of them is then held back."""
    root_and("ip", "tc", "unshare", "setpriv")
    step = [{"compute": {"seconds": 0.1}}, {"all_reduce": {"bytes": 1e4}}, BARRIER]
    chosen = scenario(jobs=[{"name": "pair", "hosts": [0, 1], "program": {"step": step}}])
    last_place = ["--policy", "static:stagger=0/0.4"]  # the second rank, in every step
    limits = ["--cap-s", "0.2", "--cap-share", "0.5", "--budget-s-per-minute", "30", "--quiet-first", "1"]
    agent = ["--mode", "active", "--block-iterations", "6", *last_place, *limits]
    result = run_scenario(chosen, tmp_path / "run", agents={"pair": agent}, iterations=60, deadline_s=DEADLINE_S)
    pair = result["pair"]
    assert pair.trace is not None
    trace = read_trace(pair.trace)
    paced = trace.isin("op", "pace")
    assert set(trace.column("rank")[paced]) == {1}
    delays_s = (trace.column("end_s") - trace.column("start_s"))[paced]
    apart_s = np.abs(np.diff(pair.steps_s_TR, axis=1))
    assert len(delays_s) >= 8
    assert np.median(apart_s) < 0.25 * np.median(delays_s)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    root_and("ip", "tc", "unshare", "setpriv")
    links, spaces = _links(), set[str]()
    file, out = tmp_path / "tiny.yaml", tmp_path / "run"
    config_files.write_yaml(file, scenario().model_dump(exclude_unset=True))
    program = "from paceenv.cli.application import main; main()"
    command = [sys.executable, "-c", program, "testbed", str(file), "-o", str(out), "--iterations", "100000"]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            until_s = time.monotonic() + DEADLINE_S
            while not any(path.stat().st_size for path in out.glob("pair/steps/*")):
                assert time.monotonic() < until_s, (tmp_path / "output").read_text()
                assert process.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.1)
            assert len(_holding(out)) > 4  # unshare, the first process, the ranks
            spaces = _network_namespaces(_holding(out)) - _network_namespaces(["self"])
            assert len(spaces) == 3  # racks and spine, and a host each
            assert _links() == links
        finally:
            process.kill()
            process.wait(DEADLINE_S)
    until_s = time.monotonic() + LEFT_AFTER_S
    while _holding(out) or _network_namespaces(entry.name for entry in Path("/proc").glob("[0-9]*")) & spaces:
        assert time.monotonic() < until_s, _holding(out)
        time.sleep(0.05)
    assert _links() == links


def _links() -> list[Any]:
    """Interfaces of our own namespace, as iproute2 tells them."""
    told = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
    return sorted(link["ifname"] for link in told)


def test_the_command_lists_its_scenarios_and_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paceenv(["testbed", "--json", str(tmp_path / "list.json")])
    listed = json.loads((tmp_path / "list.json").read_text())
    assert [one["name"] for one in listed] == config_files.names("testbed")
    assert "unequal-slack" in capsys.readouterr().out
    for wrong, why in (
        (["unequal-slak"], "did you mean unequal-slack"),
        (["unequal-slack", "--candidates", "learned"], "allowed: with --loop"),
        (["unequal-slack", "--loop", "--iterations", "5"], "at least 20 with --loop"),
    ):
        with pytest.raises(InputError, match=why):
            paceenv(["testbed", *wrong, "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(testbed_run.shutil, "which", lambda tool: None if tool in {"ip", "tc"} else f"/bin/{tool}")
    with pytest.raises(InputError, match=r"missing: ip \(apt-get install iproute2\), tc .*, root's rights"):
        run_scenario(scenario(), tmp_path / "run", iterations=4)


def on(*step: dict[str, Any], hosts: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """A job of these phases."""
    return {"name": "pair", "hosts": list(hosts), "program": {"step": list(step)}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"network": {"hosts": 2, "racks": 2}}, "uplink_mbps with several racks"),
        ({"network": {"hosts": 2, "host_mbps": 0}}, "network.host_mbps"),
        ({"network": {"hosts": 1}}, "network.hosts"),
        ({"jobs": [on(BARRIER, hosts=[0, 5])]}, "hosts of a job from 0 to 1"),
        ({"jobs": [on()]}, "program.step"),
        ({"jobs": [on({"compute": {"seconds": 0.1}})]}, "at least one transfer"),
        ({"jobs": [on(BARRIER, {"compute": {"seconds": 0.1, "ranks": [2]}})]}, "ranks that compute from 0 to 1"),
        ({"jobs": [on({"broadcast": {"bytes": 8}})]}, "all_reduce, gather, all_to_all of at most .*broadcast"),
        ({"jobs": [on({"all_reduce": HELD})]}, "communicator of its own"),
        ({"jobs": [on({"gather": {"bytes": 8, "communicator": "few"}})]}, "communicator few: one of world"),
        ({"jobs": [{"name": "pair", "hosts": [0, 1], "iteration": []}]}, "unknown key jobs.0.iteration"),
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


def transfers_of_every_kind() -> list[list[Any]]:
    """What each transfer of two iterations moves: kind, bytes of this rank, members, whether beside, and the result."""
    moved = list[list[Any]]()

    def spied(kind: str, plain: Any) -> Any:
        def spy(*given: Any, group: Any, async_op: bool, **root: Any) -> Any:
            own, into = given[kind == "all_to_all_single"], given[kind == "gather"]
            own.fill_(1.0 + dist.get_rank())
            work, members = plain(*given, group=group, async_op=async_op, **root), dist.get_process_group_ranks(group)

            def wait() -> None:
                if work is not None:
                    work.wait()
                parts = into if isinstance(into, list) else [] if into is None else [into]
                got = sorted({value for part in parts for value in part.tolist()})
                moved.append([kind, own.nbytes, members, async_op, got])

            return SimpleNamespace(wait=wait) if async_op else wait()

        return spy

    for kind in ("all_reduce", "gather", "all_to_all_single"):
        setattr(dist, kind, spied(kind, getattr(dist, kind)))
    forms: list[dict[str, Any]] = [{}, {"communicator": "pairs"}, {"communicator": "beside", "background": True}]
    transfers = [{kind: {"bytes": 2048} | form} for form in forms for kind in ("all_reduce", "gather", "all_to_all")]
    phases = [{"repeat": 2, "step": [one]} for one in transfers]
    program = {"communicators": {"pairs": {"size": 2}, "beside": {}}, "step": [*phases, BARRIER]}
    job = {"name": "four", "hosts": [0, 1, 2, 3], "program": program}
    spec = config_files.parse(Job, job, "test").spec() | {"seed": [0]}
    step, _ = emulated_step(json.loads(json.dumps(spec)))
    for iteration in range(2):
        step(iteration)
    return moved


def test_every_kind_of_transfer_moves_its_bytes_among_its_ranks(tmp_path: Path) -> None:
    everybody = list(range(4))
    for rank, moved in enumerate(run_ranks(transfers_of_every_kind, 4, tmp_path)):
        expected = list[list[Any]]()
        for members, beside in ((everybody, False), (everybody[rank // 2 * 2 :][:2], False), (everybody, True)):
            own = [1.0 + member for member in members]
            result = {"all_reduce": [sum(own)], "gather": own * (rank == members[0]), "all_to_all_single": own}
            expected += [[kind, 2048, members, beside, got] for kind, got in result.items() for _ in range(2)]
        assert moved == 2 * expected
