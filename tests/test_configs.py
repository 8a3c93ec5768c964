"""Bad configs get one clear line: the value, what is allowed, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceenv.core.errors import InputError
from paceenv.sim.cluster import load_cluster
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.ui import config_files

GOOD = """
name: tiny
job: {nodes: 4, compute_s: 0.5, gradient_bytes: 1.0e9}
fabric: {nic_gbps: 80, nodes_per_leaf: 2, uplink_gbps: 160}
tenants:
  - {period_ratio: 1.0, comm_share: 0.3}
"""


def problem(path: str | Path, *assignments: str) -> str:
    """The one line a user sees for a cluster file with ``--set`` assignments."""
    with pytest.raises(InputError) as caught:
        load_cluster(path).changed(list(assignments))
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "cluster.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("null-jiter", "null-jiter: neither a file nor one of configs/clusters: {names}; did you mean null-jitter?"),
        ("nowhere/a.yaml", "nowhere/a.yaml: no such file"),
        ("a/nul", "a/nul: neither a file nor one of configs/clusters: {names}"),
    ],
)
def test_missing_configs(name: str, expected: str) -> None:
    assert problem(name) == expected.format(names=", ".join(config_files.names("clusters")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1\n- 2\n", "expected a mapping of keys, found list"),
        ("", "the file is empty"),
        ("just words", "expected a mapping of keys, found str"),
        ("a: [1\nb: }", "not valid YAML: "),
        ("\tname: tiny", "not valid YAML: "),
        ("!!python/object/apply:os.getcwd []", "not valid YAML: could not determine a constructor"),
        (b"\xff\xfe\x00\x80", "cannot be read as text: "),
    ],
    ids=["list", "empty", "text", "unbalanced", "tab", "code", "binary"],
)
def test_files_that_are_no_mapping(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = written(tmp_path, text)
    assert problem(path).startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("fabric.nic_gbps=-5", "fabric.nic_gbps = -5; allowed: greater than 0, at most 1e+15"),
        ("fabric.nic_gbps=.nan", "fabric.nic_gbps = nan; allowed: greater than 0, at most 1e+15"),
        ("fabric.nic_gbps=fast", "fabric.nic_gbps = 'fast'; allowed: input should be a valid number"),
        ("noise.jitter_cv=1.5", "noise.jitter_cv = 1.5; allowed: at least 0, at most 1"),
        ("job.nodes=0", "job.nodes = 0; allowed: input should be greater than or equal to 1"),
        ("job.compute_s={uniform: [2, 1]}", "job.compute_s = {'uniform': [2, 1]}; allowed: lower end first"),
        ("job.compute_s={loguniform: [0, 1]}", "job.compute_s = {'loguniform': [0, 1]}; allowed: two positive numbers"),
        ("job.compute_s={normal: [1, -1]}", "job.compute_s = {'normal': [1, -1]}; allowed: a standard deviation of at"),
        ("tenants.0.comm_share=3", "tenants.0.comm_share = 3; allowed: at least 0, at most 0.99"),
        ("tenants=[{comm_share: 0.1}]", "tenants.0.period_ratio is missing"),
        ("fabric.placement=random", "fabric.placement = 'random'; allowed: input should be 'packed' or 'spread'"),
        ("job.nodes_per_group=3", "nodes to be a multiple of nodes_per_group (4 and 3)"),
        ("job.nodes_per_group=2", "barrier: true for several groups"),
        ("noise.slow_ranks=9", "noise.slow_ranks at most the 4 ranks of the job"),
        ("post_collective_work.share=0.1", "job.barrier: true where a group has post-collective work"),
        ("fabric.nic_gbsp=5", "unknown key fabric.nic_gbsp = 5; did you mean nic_gbps?"),
        ("tenants.0.colour=red", "unknown key tenants.0.colour = 'red'; known keys: period_ratio, comm_share"),
    ],
)
def test_values_out_of_range_and_unknown_keys(tmp_path: Path, assignment: str, expected: str) -> None:
    message = problem(written(tmp_path, GOOD), assignment)
    assert message.startswith("--set: ")
    assert expected in message


def test_unknown_keys_are_told_before_what_they_leave_missing() -> None:
    data = {"name": "x", "environment": {"clusters": [{"cluster": "two-jobs"}], "mechanism": []}, "learning_rate": 1}
    with pytest.raises(InputError) as caught:
        config_files.parse(TrainConfig, data, "mine.yaml")
    missing = "environment.mechanisms is missing"
    said = [part.partition(" = ")[0] for part in str(caught.value).split("; also: ")]
    assert said == ["mine.yaml: unknown key environment.mechanism", "unknown key learning_rate", missing]


def test_the_file_is_named_where_the_mistake_is_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("nic_gbps: 80", "nic_gbps: -80"))
    assert problem(path) == f"{path}: fabric.nic_gbps = -80; allowed: greater than 0, at most 1e+15"


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b=1", {"a": {"b": 1}, "l": [{"x": 0}, 2]}),
        ("c.d.e=x", {"a": {}, "l": [{"x": 0}, 2], "c": {"d": {"e": "x"}}}),
        ("a.b=1e9", {"a": {"b": 1e9}, "l": [{"x": 0}, 2]}),
        ("a.b={uniform: [1, 2]}", {"a": {"b": {"uniform": [1, 2]}}, "l": [{"x": 0}, 2]}),
        ("a.b=x=y", {"a": {"b": "x=y"}, "l": [{"x": 0}, 2]}),
        ("l.0.x=3", {"a": {}, "l": [{"x": 3}, 2]}),
    ],
)
def test_set_value(assignment: str, expected: dict[str, Any]) -> None:
    data: dict[str, Any] = {"a": {}, "l": [{"x": 0}, 2]}
    config_files.set_value(data, assignment)
    assert data == expected


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("nonsense", "--set nonsense: expected key=value, for example noise.jitter_cv=0.02"),
        ("a.b=2", "--set a.b=2: a holds a value, not a section"),
        ("l.2=2", "--set l.2=2: 2 is not one of the entries 0 to 1"),
        ("l.x.y=2", "--set l.x.y=2: x is not one of the entries 0 to 1"),
        ("a=[1,", "--set a=[1,: "),
    ],
)
def test_set_value_refuses(assignment: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        config_files.set_value({"a": 1, "l": [0, 1]}, assignment)
    assert str(caught.value).startswith(expected)
