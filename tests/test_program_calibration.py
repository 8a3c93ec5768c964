"""Programs from traces: what is typed and traced is found again; a real profile; where nothing can be told; messages
between pipeline stages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from described_steps import ideal_s
from importer_samples import profile_of
from traced_jobs import H100_DIR, changed, mean_step_s, needs_h100

from benchmarks._common import recorded
from paceenv.calibration.fit_trace import JobFit, fit_trace
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import Trace, write_trace
from paceenv.importers.inputs import read_inputs
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.cluster.program.step_program import StepProgram, flat
from paceenv.ui import config_files

STEPS = 120
SUMMED = [{"compute": {"seconds": 0.02}}, {"all_reduce": {"bytes": 1e8}}]


def typed(step: list[dict[str, Any]] | str, communicators: dict[str, Any], nodes: int = 8, **fabric: Any) -> Cluster:
    """A cluster with a program, whose step may be YAML."""
    step = yaml.safe_load(step) if isinstance(step, str) else step
    data = {"name": "typed", "job": {"nodes": nodes}, "program": {"communicators": communicators, "step": step}}
    data |= {"fabric": {"nic_gbps": 100.0, "nodes_per_leaf": 64, "uplink_gbps": 1e6, "latency_us": 0} | fabric}
    data |= {"noise": {"jitter_cv": 0.01, "common_cv": 0.005}}
    return config_files.parse(Cluster, data, "test")


EXPERTS = typed(
    """
- repeat: 6
  step:
  - compute: {seconds: 0.02}
  - all_reduce: {bytes: 1.0e+8, communicator: gradients, background: true, can_wait: true}
  - all_to_all: {bytes: 6.0e+7, communicator: experts}
- compute: {seconds: 0.03}
""",
    {"gradients": {}, "experts": {"size": 4}},
)
BUCKETS = typed(
    """
- compute: {seconds: 0.05}
- repeat: 5
  step:
  - compute: {seconds: 0.02}
  - all_reduce: {bytes: 1.5e+8, background: true, can_wait: true}
- compute: {seconds: 0.01}
- all_reduce: {bytes: 2.0e+8, background: true, can_wait: true}
""",
    {},
)
GATHERS = typed(
    """
- all_gather: {bytes: 1.2e+8, communicator: shards, background: true, name: a}
- repeat: 3
  step:
  - all_gather: {bytes: 1.2e+8, communicator: shards, background: true, name: b}
  - wait: a
  - compute: {seconds: 0.008}
  - all_gather: {bytes: 1.2e+8, communicator: shards, background: true, name: a}
  - wait: b
  - compute: {seconds: 0.008}
- wait: a
- repeat: 4
  step:
  - compute: {seconds: 0.03}
  - reduce_scatter: {bytes: 1.2e+8, communicator: shards, background: true, can_wait: true}
""",
    {"shards": {"size": 4, "stride": 2}},
)
"""The gathers of a layer's parameters, one ahead of its compute, and reduce-scatters of the gradients."""
PROGRAMS = {"experts": EXPERTS, "buckets": BUCKETS, "gathers": GATHERS}


def transfers(program: StepProgram) -> list[tuple[Any, ...]]:
    """Kind, payload, background and can_wait of every transfer of a step."""
    found = [phase.transfer() for phase in flat(program.step)]
    return [(op, one.bytes, one.background, one.can_wait) for op, one in filter(None, found)]


def compute_s(program: StepProgram) -> list[float]:
    """What is computed between two transfers or waits."""
    found, last = list[float](), True
    for phase in flat(program.step):
        if phase.compute is not None:
            if last:
                found.append(0.0)
            found[-1] += phase.compute.seconds
        last = phase.compute is None
    return found


def program_of(fit: JobFit) -> StepProgram:
    assert fit.cluster.program is not None
    return fit.cluster.program


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_typed_program_is_found_again(name: str) -> None:
    wanted = PROGRAMS[name]
    fit = fit_trace(recorded(wanted, 0, STEPS), program=True)
    assert wanted.program is not None
    found = program_of(fit)
    assert abs(fit.mean_error) < 0.01
    was, now = transfers(wanted.program), transfers(found)
    if name != "experts":  # nothing happens after the last transfer, so it might as well block
        was[-1], now[-1] = was[-1][:2], now[-1][:2]
    assert now == was
    assert compute_s(found) == pytest.approx(compute_s(wanted.program), rel=0.02)
    sizes = {(one.size or 8, one.stride) for one in found.communicators.values()} - {(8, 1)}
    assert sizes == {"experts": {(4, 1)}, "buckets": set(), "gathers": {(4, 2)}}[name]
    assert fit.cluster.noise.jitter_cv == pytest.approx(0.01, rel=0.25)
    (rate,) = [one for one in fit.parameters if one.key == "fabric.nic_gbps"]
    assert rate.is_identified == ("fabric.nic_gbps" not in fit.cluster.stand_ins) == (name != "experts")
    assert rate.is_identified or "nccl-tests output of the same links, settles it" in rate.reason
    assert rate.value == pytest.approx(100.0, rel=0.01 if rate.is_identified else 0.05)


def test_phases_that_vary_by_themselves_are_told_from_steps_that_do() -> None:
    """Ranks meet after every phase, so each phase is as long as that of its slowest rank."""
    part = "- compute: {{seconds: 0.02, micro_batch: {}}}\n- all_reduce: {{bytes: 1.0e+7}}\n"
    step = "".join(map(part.format, range(8)))
    wanted = typed(step, {}).changed(["program.length_cv=0.1"], "test")
    fit = fit_trace(recorded(wanted, 0, STEPS), program=True)
    assert program_of(fit).length_cv == pytest.approx(0.1, rel=0.1)
    assert abs(fit.mean_error) < 0.01


def test_latency_is_told_apart_by_sizes() -> None:
    step = [*SUMMED, {"all_reduce": {"bytes": 1e4, "communicator": "b"}}]
    fit = fit_trace(recorded(typed(step, {"b": {}}, latency_us=50.0), 0, STEPS), program=True)
    assert fit.cluster.fabric.latency_us == pytest.approx(50.0, rel=0.02)
    assert fit.cluster.fabric.nic_gbps == pytest.approx(100.0, rel=0.01)


def test_ranks_that_differ_are_named() -> None:
    step = [
        {"compute": {"seconds": 0.02}},
        {"compute": {"seconds": 0.03, "ranks": [1, 3]}},
        {"all_reduce": {"bytes": 1e7, "communicator": "pairs", "ranks": [0, 1]}},
        {"compute": {"seconds": 0.04}},
        {"all_reduce": {"bytes": 1e8, "every": 2}},
    ]
    fit = fit_trace(recorded(typed(step, {"pairs": {"size": 2}}, nodes=4), 0, STEPS), program=True)
    assert abs(fit.mean_error) < 0.01
    phases = program_of(fit).step
    pairs = next(one.all_reduce for one in phases if one.all_reduce and one.all_reduce.ranks)
    assert pairs.ranks == [0, 1]
    assert [one.all_reduce.every for one in phases if one.all_reduce] == [1, 2]
    late = next(one.compute for one in phases if one.compute and one.compute.ranks == [1])
    assert late.seconds == pytest.approx(0.05, rel=0.02)


@pytest.mark.slow
def test_a_program_is_chosen_where_communicators_overlap() -> None:
    trace = recorded(EXPERTS, 0, STEPS)
    found = fit_trace(trace, name="chosen", check=True)
    assert found.cluster.program is not None
    assert "transfers of several communicators overlap" in found.notes[0]
    lines = found.cluster.calibration["held_out_steps"]["lines"]
    assert {line["quantity"]: line["verdict"] for line in lines}["mean step"] != "off"
    assert fit_trace(trace, program=False).cluster.program is None


def test_one_collective_stays_one_collective() -> None:
    assert fit_trace(recorded(typed(SUMMED, {}), 0, STEPS)).cluster.program is None


def test_what_cannot_be_told_says_what_would_settle_it() -> None:
    trace = recorded(EXPERTS, 0, STEPS)
    rank, group = trace.column("rank"), trace.column("group")
    missing = Trace(trace.table.filter(rank != 1), trace.metadata)
    with pytest.raises(InputError, match="A trace of all ranks settles it"):
        fit_trace(missing, program=True)
    iteration, seq = trace.column("iteration"), trace.column("seq")
    some = ~((group >= 0) & (iteration % 7 == seq % 7) & (seq > 3))
    irregular = Trace(trace.table.filter(some), trace.metadata)
    with pytest.raises(InputError, match="transfers differ from step to step"):
        fit_trace(irregular, program=True)


def awaited(trace: Trace) -> Trace:
    """As the live recorder writes it: an all-reduce in the background begins where its rank waits, after its work."""
    columns = {name: trace.column(name).copy() for name in trace.table.column_names}
    mine, at = columns["op"] == "all_reduce", (columns["iteration"], columns["rank"])
    others, ready_TR = ~mine & (columns["op"] != "barrier"), np.zeros((STEPS, 8))
    np.maximum.at(ready_TR, (at[0][others], at[1][others]), columns["end_s"][others])
    columns["start_s"][mine] = ready_TR[at[0][mine], at[1][mine]]
    columns["end_s"][mine] = np.maximum(columns["end_s"], columns["start_s"])[mine]
    columns["seq"][mine] += 100
    return changed(trace, **columns)


@pytest.mark.slow
def test_a_known_program_takes_its_times_from_a_trace() -> None:
    wrong = ["program.step.0.step.0.compute.seconds=0.05", "program.step.1.compute.seconds=0.05"]
    base = EXPERTS.changed([*wrong, "fabric.nic_gbps=120", "noise={}"], "guess")
    fit = fit_trace(awaited(recorded(EXPERTS, 0, STEPS)), base=base)
    assert EXPERTS.program is not None
    assert compute_s(program_of(fit)) == pytest.approx(compute_s(EXPERTS.program), rel=0.02)
    assert fit.cluster.fabric.nic_gbps == pytest.approx(100.0, rel=0.03)
    assert abs(fit.mean_error) < 0.01


@pytest.mark.slow
def test_a_diagnosis_tries_to_hold_transfers_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the fitted program; its gain is that of the typed one."""
    part = [
        {"compute": {"seconds": 0.04}},
        {"all_reduce": {"bytes": 2e8, "background": True, "can_wait": True}},
        {"all_to_all": {"bytes": 2e8, "communicator": "experts"}},
    ]
    cluster = typed([{"repeat": 4, "step": part}], {"experts": {}}, nodes=4)
    path = tmp_path / "trace.parquet"
    write_trace(recorded(cluster, 0, 60), path)
    assert not application.run(["diagnose", str(path)])
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(
        r"Pacing helps against communication contention \(simulated: static:defer=0/0.1 \+([\d.]+)% throughput", said
    )
    assert found, said
    passive_s, held_s = (mean_step_s(cluster, one, seeds=2, steps=300) for one in ("passive", "static:defer=0/0.1"))
    assert float(found[1]) == pytest.approx(100.0 * (passive_s / held_s - 1.0), abs=1.5)


@needs_h100
def test_a_real_profile_replays_within_five_percent() -> None:
    trace = read_inputs(sorted(H100_DIR.glob("*.json.gz"))).require_trace()
    fit = fit_trace(trace, program=True)
    assert abs(fit.mean_error) < 0.05
    found = transfers(program_of(fit))
    assert len(found) == 22 - 2
    assert {op for op, *_ in found} == {"reduce_scatter", "all_gather"}
    assert max(size for _, size, *_ in found) == 150994944.0
    assert {one.every for phase in program_of(fit).step if (one := (phase.transfer() or (None, None))[1])} == {1, 2}


AHEAD, BACK = [[0, 2], [1, 3]], [[2, 0], [3, 1]]


def without_groups(trace: Trace, *, peers: bool) -> Trace:
    """The trace with the rank at the other end of a message in place of its process group, or with neither."""
    messages, rank = trace.isin("op", "send", "recv"), trace.column("rank")
    peer = np.where(messages & peers, rank ^ 2, trace.column("peer"))
    return changed(trace, peer=peer, group=np.where(messages, -1, trace.column("group")))


@pytest.mark.parametrize("background", ["false", "true"])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_messages_are_fitted_between_their_ranks(background: str, is_grouped: bool) -> None:
    """Two stages of two replicas, three micro-batches, all forward passes first."""
    send = f"send: {{bytes: 2.0e+7, background: {background}, communicator"
    step = f"""
- repeat: 3
  step: [compute: {{seconds: 0.01, ranks: [0, 1]}}, {send}: ahead}}, compute: {{seconds: 0.01, ranks: [2, 3]}}]
- repeat: 3
  step: [compute: {{seconds: 0.02, ranks: [2, 3]}}, {send}: back}}, compute: {{seconds: 0.02, ranks: [0, 1]}}]
- all_reduce: {{bytes: 1.0e+8, communicator: data}}
"""
    groups = {"ahead": {"pairs": AHEAD}, "back": {"pairs": BACK}, "data": {"size": 2, "grows": True}}
    cluster = typed(step, groups, nodes=4)
    trace = recorded(cluster, 0, 40)
    fit = fit_trace(trace if is_grouped else without_groups(trace, peers=True), program=True)
    assert abs(fit.mean_error) < 0.01
    assert fit.cluster.fabric.nic_gbps == pytest.approx(100.0, rel=0.01)
    assert [one.pairs for one in program_of(fit).communicators.values() if one.pairs] == [AHEAD, BACK]
    assert ideal_s(fit.cluster) == pytest.approx(ideal_s(cluster), rel=0.01)
    with pytest.raises(InputError, match="pairs of 4 ranks do not say which 8 have"):
        fit.cluster.with_nodes(8)


def test_messages_without_a_known_end_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = [{"compute": {"seconds": 0.01}}, {"send": {"bytes": 1e6, "communicator": "pairs"}}, *SUMMED]
    cluster = typed(step, {"pairs": {"pairs": [[0, 1], [2, 3]]}}, nodes=4)
    trace = without_groups(recorded(cluster, 0, 40), peers=False)
    with pytest.raises(InputError, match=r"does not say who is at the other end of a (send|recv)"):
        fit_trace(trace, program=True)
    path = tmp_path / "unknown.parquet"
    write_trace(trace, path)
    assert not application.run(["calibrate", str(path), "-o", str(tmp_path / "fitted.yaml")])
    said = " ".join("".join(capsys.readouterr()).split())
    assert "sends and receives count as compute: the trace does not say who is at the other end" in said


def test_a_profile_names_the_other_end(tmp_path: Path) -> None:
    """As PyTorch writes it: the receiver beside a send, the sender beside a receive, both as ranks of the job."""
    files = []
    for rank in range(3):
        profile = profile_of(rank)
        kernels = [one for one in profile["traceEvents"] if "AllReduce" in one.get("name", "")][::2]
        for kernel in kernels if rank < 2 else ():
            name, key, other = ("send", "Dst Rank", 1) if rank == 0 else ("recv", "Src Rank", 0)
            said = {"Collective name": name, key: other, "In msg nelems": 256, "dtype": "BFloat16"}
            said |= {"correlation": kernel["args"]["correlation"]}
            event = kernel | {"name": "ncclDevKernel_SendRecv", "tid": 31, "args": said, "dur": 100.0}
            profile["traceEvents"].append(event)
        files.append(tmp_path / f"rank{rank}.json")
        files[-1].write_text(json.dumps(profile))
    trace = read_inputs(files).require_trace()
    for op, rank, peer in (("send", 0, 1), ("recv", 1, 0)):
        mine = trace.isin("op", op)
        assert set(trace.column("rank")[mine].tolist()) == {rank}
        assert set(trace.column("peer")[mine].tolist()) == {peer}
    assert set(trace.column("peer")[~trace.isin("op", "send", "recv")].tolist()) == {-1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pairs": [[0, 1], [1, 2]]}, "pairs in which no rank is twice"),
        ({"pairs": [[0, 1]], "size": 2}, "pairs without size, stride and grows"),
        ({"pairs": [[0, 9]]}, "pairs of the 4 ranks"),
    ],
)
def test_pairs_that_are_none_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        typed([{"send": {"bytes": 1.0, "communicator": "pairs"}}], {"pairs": given}, nodes=4)
