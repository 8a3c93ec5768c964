"""Messages between pipeline stages in traces: fitted where the other end is known, named where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from importer_samples import profile_of
from test_program_calibration import typed

from benchmarks._common import recorded
from paceenv.calibration.fit_trace import fit_trace
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.core.trace import SCHEMA, Trace, write_trace
from paceenv.importers.inputs import read_inputs
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster
from paceenv.sim.engine.simulator import episode_keys

AHEAD, BACK = [[0, 2], [1, 3]], [[2, 0], [3, 1]]
SUMMED = [{"compute": {"seconds": 0.02}}, {"all_reduce": {"bytes": 1e8}}]


def pipeline(*, background: bool = False) -> Cluster:
    """Two stages of two replicas, three micro-batches, all forward passes first."""
    send = f"send: {{bytes: 2.0e+7, background: {str(background).lower()}, communicator"
    step = f"""
- repeat: 3
  step: [compute: {{seconds: 0.01, ranks: [0, 1]}}, {send}: ahead}}, compute: {{seconds: 0.01, ranks: [2, 3]}}]
- repeat: 3
  step: [compute: {{seconds: 0.02, ranks: [2, 3]}}, {send}: back}}, compute: {{seconds: 0.02, ranks: [0, 1]}}]
- all_reduce: {{bytes: 1.0e+8, communicator: data}}
"""
    groups = {"ahead": {"pairs": AHEAD}, "back": {"pairs": BACK}, "data": {"size": 2, "grows": True}}
    return typed(step, groups, nodes=4)


def without_groups(trace: Trace, *, peers: bool) -> Trace:
    """The trace with the rank at the other end of a message in place of its process group, or with neither."""
    columns = {name: trace.column(name).copy() for name in SCHEMA.names}
    messages = np.isin(columns["op"].astype(str), ("send", "recv"))
    if peers:
        other = {0: 2, 2: 0, 1: 3, 3: 1}
        columns["peer"][messages] = [other[int(rank)] for rank in columns["rank"][messages]]
    columns["group"][messages] = -1
    return Trace.from_columns(columns, trace.metadata, "test")


def ideal_s(cluster: Cluster) -> float:
    return float(derive(cluster, episode_keys([0])).jobs["ideal_step_s"][0])


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_messages_are_fitted_between_their_ranks(background: bool, is_grouped: bool) -> None:
    cluster = pipeline(background=background)
    trace = recorded(cluster, 0, 40)
    fit = fit_trace(trace if is_grouped else without_groups(trace, peers=True), program=True)
    assert abs(fit.mean_error) < 0.01
    assert fit.cluster.fabric.nic_gbps == pytest.approx(100.0, rel=0.01)
    program = fit.cluster.program
    assert program is not None
    assert [one.pairs for one in program.communicators.values() if one.pairs] == [AHEAD, BACK]
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
    assert set(trace.column("peer")[~(trace.isin("op", "send") | trace.isin("op", "recv"))].tolist()) == {-1}


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
