"""The law of a link from nccl-tests output: reading its tables, recovering known terms, and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from traced_jobs import JEAN_ZAY_DIR, json_of, needs_jean_zay

from paceenv.calibration.bandwidth import fit_bandwidth
from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.importers.nccl_tests import Table, read_tables
from paceenv.sim.cluster.collectives import Law, Op, volume

HEADER = """\
# nThread 1 nGpus {n} minBytes 1024 maxBytes 4294967296 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SIZES = 4.0 ** np.arange(5, 17)
CHUNKED = "# Collective test starting: all_reduce_perf\n" + HEADER.splitlines(keepends=True)[-2]


def printed(law: Law, op: Op = "all_reduce", n: int = 8, noise: float = 0.0, program: str = "", nodes: int = 0) -> str:
    """nccl-tests output of links that obey ``law``, with relative noise, in microseconds to two places; the header's
    ranks are spread evenly over so many hosts, or on one without a name."""
    rng = np.random.default_rng(1)
    hosts = [f"gpu-{i * nodes // n:03d}.cluster" if nodes else "node" for i in range(n)]
    about = [f"#  Rank {i:2d} Group  0 Pid 4{i} on {hosts[i]} device {i:2d} [0x{i:02x}] A GPU" for i in range(n)]
    text = (f"# Collective test starting: {program}\n" if program else "") + HEADER.format(n=n, ranks="\n".join(about))
    for size in SIZES:
        time_us = law.time_s(volume(op, "ring", n, float(size))) * 1e6 * (1 + noise * rng.normal(size=2))
        bus = (2 if op == "all_reduce" else 1) * (n - 1) / n
        ways = "".join(f" {t:10.2f} {size / t / 1e3:8.2f} {bus * size / t / 1e3:8.2f}      0" for t in time_us)
        text += f"{size:12.0f} {size / 4:13.0f}     float     sum      -1 {ways}\n"
    return text + "# Out of bounds values : 0 OK\n#\n"


def read_table(path: Path) -> Table:
    """The only table in a file."""
    (table,) = read_tables(path)
    return table


def written(folder: Path, text: str, name: str = "all_reduce_perf.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("law", [Law(5e-6, 230e9, 2e-8), Law(12e-6, 20e9, 3e-7), Law(2e-5, 1.2e8, 0.0)])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_known_terms_are_recovered(tmp_path: Path, law: Law, op: Op) -> None:
    table = read_table(written(tmp_path, printed(law, op), f"{op}_perf.txt"))
    assert (table.op, table.members) == (op, 8)
    fit = fit_bandwidth(table)
    assert fit.law.hop_s == pytest.approx(law.hop_s, rel=2e-3)
    assert fit.law.bandwidth_Bps == pytest.approx(law.bandwidth_Bps, rel=2e-3)
    assert fit.law.sqrt_s == pytest.approx(law.sqrt_s, rel=5e-3, abs=1e-3 * law.hop_s / 32)
    assert fit.misfit < 1e-3


def test_standard_errors_cover_the_truth_under_noise(tmp_path: Path) -> None:
    law = Law(5e-6, 230e9, 2e-8)
    fit = fit_bandwidth(read_table(written(tmp_path, printed(law, noise=0.03))))
    for name in ("hop_s", "bandwidth_Bps", "sqrt_s"):
        found, error, truth = (getattr(one, name) for one in (fit.law, fit.se, law))
        assert 0 < error < truth
        assert found == pytest.approx(truth, abs=4 * error)
    assert 0.01 < fit.misfit < 0.05


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHUNKED, "0 sizes; allowed: at least 1"),
        (CHUNKED + "1024 256 float 10 1 1 0\n", "line 3: '1024 256 float 10 1 1 0'; allowed: size, count, type"),
        (CHUNKED + "1024 256 float sum -1 x 1 1 0 10 1 1 0\n", "allowed: size, count, type ... time > 0"),
        (CHUNKED + "1024 256 float sum -1 0 1 1 0 10 1 1 0\n", "allowed: size, count, type ... time > 0"),
        (CHUNKED + "".join(f"{2**k} 1 float sum -1 9 0 0 0 9 0 0 0\n" for k in range(6)), "0 ranks; allowed: at least"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path, text, "log.txt")
    with pytest.raises(InputError) as caught:
        fit_bandwidth(read_table(path))
    assert str(caught.value).startswith(str(path))
    assert expected in str(caught.value)


LAW = Law(12e-6, 25e9, 1e-7)
DECORATIONS = {
    "srun -l": lambda n: " 0: ",
    "mpirun --tag-output": lambda n: "[1,0]<stdout>:",
    "mpirun 5": lambda n: "[prterun-gpu7-4711@1,0]<stdout>: ",
    "mpirun --timestamp-output": lambda n: f"Thu Apr 25 12:00:{n % 60:02d} 2024[1,0]<stdout>:",
    "hydra": lambda n: "[0] ",
    "torchrun": lambda n: "[default0]:",
    "kubectl": lambda n: f"2024-04-25T12:00:{n % 60:02d}.123456789Z ",
    "docker compose": lambda n: "worker-0-1  | ",
    "logger": lambda n: f"[2024-04-25 12:00:{n % 60:02d},123] ",
}


@pytest.mark.parametrize("how", DECORATIONS)
def test_decorated_lines_give_the_same_table(tmp_path: Path, how: str) -> None:
    plain = read_table(written(tmp_path, printed(LAW, program="all_gather_perf", op="all_gather"), "plain"))
    lines = printed(LAW, program="all_gather_perf", op="all_gather").splitlines()
    decorated = [f"{DECORATIONS[how](n)}{line}" for n, line in enumerate(lines)]
    path = written(tmp_path, "\n".join(["#!/bin/bash", *decorated]), "job.out")
    found = read_table(path)
    assert (found.op, found.members) == ("all_gather", 8)
    np.testing.assert_array_equal(found.size_bytes, plain.size_bytes)
    np.testing.assert_array_equal(found.time_s, plain.time_s)


def test_several_programs_in_one_file(tmp_path: Path) -> None:
    ops: dict[str, Op] = {"reduce_scatter_perf": "reduce_scatter", "all_reduce_perf": "all_reduce"}
    ops |= {"broadcast_perf": "broadcast", "sendrecv_perf": "send"}
    text = "".join(f"+ mpirun ./build/{name} -b 8\n" + printed(LAW, op) for name, op in ops.items())
    path = written(tmp_path, text, "sweep.log")
    assert [table.op for table in read_tables(path)] == list(ops.values())
    with pytest.raises(InputError, match=r"4 tables .*, table 2 in line .*; allowed: one"):
        application.run(["calibrate", str(path), "-o", str(tmp_path / "x.yaml")])


def test_few_sizes_give_a_bandwidth_only(tmp_path: Path) -> None:
    lines = printed(Law(5e-6, 20e9, 0.0)).splitlines()
    rows = [line for line in lines if line.lstrip()[:1].isdigit()]
    path = written(tmp_path, "\n".join([*(line for line in lines if line not in rows), *rows[-2:]]), "log")
    fit = fit_bandwidth(read_table(path))
    assert fit.is_bandwidth_only
    assert fit.law.bandwidth_Bps == pytest.approx(20e9, rel=0.01)
    assert [one.key for one in fit.parameters()] == ["fabric.intra_node_gbps"]
    assert "latency cannot be identified" in fit.text


@pytest.mark.parametrize(("nodes", "n"), [(1, 8), (16, 16), (16, 128)])
def test_the_header_says_where_the_links_are_and_the_config_simulates_them(tmp_path: Path, nodes: int, n: int) -> None:
    """The simulated all-reduce of the largest payload takes as long as the table says."""
    path, out = written(tmp_path, printed(LAW, n=n, nodes=nodes)), tmp_path / "links.yaml"
    table = read_table(path)
    assert (table.nodes, table.members) == (nodes, n)
    config = json_of("calibrate", path, "-o", out)["cluster"]
    rate = config["calibration"]["fitted"]["fabric.intra_node_gbps" if nodes == 1 else "fabric.nic_gbps"]
    assert rate["value"] == pytest.approx(8.0 * 25.0, rel=0.01)
    inside_gbps = config["fabric"].get("intra_node_gbps", 1e6)
    assert (inside_gbps < 1e6) == (nodes == 1), "across nodes the links inside do not limit"
    simulated = json_of("simulate", out, "-i", "3", "--seeds", "1")
    assert (simulated["nodes"], simulated["ranks"]) == (nodes, n)
    assert simulated["stand_ins"]["job.compute_s"] == 1.0
    assert simulated["step_time_s"]["mean"] - 1.0 == pytest.approx(table.time_s[-1], rel=0.02)
    based = json_of("calibrate", path, "-o", tmp_path / "based.yaml", "--base", "h100-ndr")
    assert based["cluster"]["job"]["nodes"] == 16, "the base's own job"


def test_rows_that_failed_their_check_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest size has wrong elements in place, and is ten times too fast."""
    lines = printed(LAW).splitlines()
    at = max(i for i, line in enumerate(lines) if line.lstrip()[:1].isdigit())
    size = int(lines[at].split()[0])
    lines[at] = f"{size} {size // 4} float sum -1 " + "100.0 1.0 1.75 0 100.0 1.0 1.75 4711"
    path = written(tmp_path, "\n".join(lines))
    table = read_table(path)
    assert size not in table.size_bytes
    assert len(table.size_bytes) == len(SIZES) - 1
    assert fit_bandwidth(table).law.bandwidth_Bps == pytest.approx(25e9, rel=1e-2)
    assert application.run(["calibrate", str(path), "-o", str(tmp_path / "links.yaml")]) == 0
    assert f"1 row of {len(SIZES)} failed their own check (#wrong > 0; bytes {size})" in capsys.readouterr().err
    bad = "\n".join(line.removesuffix("0") + "3" if line.lstrip()[:1].isdigit() else line for line in lines)
    with pytest.raises(InputError, match=f"all {len(SIZES)} rows failed their own check"):
        read_tables(written(tmp_path, bad, "bad.txt"))
    unchecked = printed(LAW).replace("     0\n", "   N/A\n")
    assert len(read_table(written(tmp_path, unchecked, "unchecked.txt")).size_bytes) == len(SIZES)


def test_a_poor_law_and_unknown_hosts_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(text: str) -> str:
        application.run(["calibrate", str(written(tmp_path, text)), "-o", str(tmp_path / "links.yaml")])
        return capsys.readouterr().err

    poor = said(printed(LAW, noise=0.4, nodes=1))
    assert "the law misses the table by 20" in poor
    assert "most at" in poor
    assert "most at" not in said(printed(LAW, nodes=1))
    older = printed(LAW).replace("root     time", "time").replace(" -1 ", " ").replace("#wrong", " error")
    older = "\n".join(line.replace("      0", "  4e-07") for line in older.splitlines() if "Rank" not in line)
    assert "lists no hosts; 8 ranks are taken to be inside one node" in said(older)


@needs_jean_zay
@pytest.mark.parametrize(
    ("name", "members", "gbps"), [("n1_32gb_all_reduce_bench.txt", 4, 990), ("all_reduce_bench-32gb-n4.txt", 16, 84.7)]
)
def test_real_output_of_the_benchmark(name: str, members: int, gbps: float) -> None:
    """Bus bandwidth as it prints it once warm."""
    table = read_table(JEAN_ZAY_DIR / name)
    assert table.members == members
    assert fit_bandwidth(table).law.bandwidth_Bps * 8e-9 == pytest.approx(gbps, rel=0.01)
