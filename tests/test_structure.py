"""Rooms and arrows: who imports whom, read from the sources; and what a process never loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("policies", "trainers", "live", "configs")
ORDER = (
    *("core", "ui", "configs", "sim", "envs", "policies", "importers", "calibration", "diagnosis"),
    *("whatif", "live", "live command", "report", "cli", "trainers", "benchmarks"),
)
"""Rooms from below to above: each imports those before it, and ``paceenv`` itself is imported by none."""
ALLOWED = {room: set(ORDER[:k]) for k, room in enumerate(ORDER)} | {"live": {"core", "policies"}}
COMMON_BASENAMES = {"__init__", "__main__"}


def _name(path: Path) -> str:
    """The name that a file is imported under."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in {"paceenv", "benchmarks"} else ("paceenv", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _name(path): path
    for room in ("paceenv", "benchmarks", *LINKED)
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents if ROOT in parent.parents)
}
"""Every module of ours by name, none twice."""


@cache
def _imported(path: Path) -> set[str]:
    """All names that a file imports, in functions as well: modules, and what is taken from them."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _imports(name: str) -> set[str]:
    """Modules of ours that a module imports."""
    found = {one if one in FILES else one.rpartition(".")[0] for one in _imported(FILES[name])}
    return (found & set(FILES)) - {name}


def _room(name: str) -> str:
    """The room of a module; what has more rights than its folder has a name of its own."""
    if name.startswith(("paceenv.live.testbed", "paceenv.live.live_command", "paceenv.live.inspect")):
        return "live command"
    parts = name.split(".")
    return parts[1] if parts[0] == "paceenv" and len(parts) > 1 else parts[0]


def _cycle(nodes: Iterable[str], after: Callable[[str], set[str]]) -> list[str]:
    """Nodes that come after themselves, or nothing."""
    try:
        TopologicalSorter({node: after(node) for node in nodes}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_is_looked_at() -> None:
    assert len(FILES) > 200
    assert sum(len(_imports(name)) for name in FILES) > 4 * len(FILES)
    assert {_room(name) for name in FILES} == {*ALLOWED, "paceenv"}


@pytest.mark.parametrize("room", ALLOWED)
def test_arrows_point_down(room: str) -> None:
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if _room(name) == room
        for other in _imports(name)
        if _room(other) not in ALLOWED[room] | {room, "paceenv"}
    ]
    assert wrong == []


def test_modules_have_no_cycle() -> None:
    assert _cycle(FILES, lambda name: _imports(name)) == []


def test_folders_have_no_cycle() -> None:
    """Apart from a package and its own subpackages, which are one room."""

    def folder(name: str) -> str:
        return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]

    def after(one: str) -> set[str]:
        others = {folder(o) for name in FILES if folder(name) == one for o in _imports(name)} - {one}
        return {o for o in others if not f"{o}.".startswith(f"{one}.") and not f"{one}.".startswith(f"{o}.")}

    assert _cycle({folder(name) for name in FILES}, after) == []


def test_a_basename_stands_once() -> None:
    counts = Counter(path.stem for path in FILES.values())
    assert {stem for stem, count in counts.items() if count > 1} <= COMMON_BASENAMES


def test_one_room_imports_ray() -> None:
    found = [name for name, path in FILES.items() if any(one.partition(".")[0] == "ray" for one in _imported(path))]
    assert found == ["paceenv.trainers.sweep.ray_tuner", "paceenv.trainers.sweep.trainables"]


def test_a_cycle_is_found() -> None:
    assert set(_cycle("abc", lambda node: {"a": {"b"}, "b": {"a"}, "c": {"a"}}[node])) == {"a", "b"}


SIMULATOR = {"numba", "gymnasium", "stable_baselines3", "ray", "pydantic", "scipy", "matplotlib"} | {
    f"paceenv.{room}" for room in ("sim", "envs", "importers", "calibration", "diagnosis", "validation", "trainers")
}
"""What a production node need not have."""
LIGHT = {
    "help": ("from paceenv.cli import application; application.run(['--help'])", {"numpy", "numba", "torch", "typer"}),
    "rules": (
        "import paceenv.policies.base, paceenv.policies.rules",
        {"torch", "numba", "scipy", "yaml", "safetensors"},
    ),
    "launch": (
        "from paceenv.live.decide import control, pacer; import paceenv.live.start.run_command, paceenv.policies.names",
        SIMULATOR | {"torch"},
    ),
    "agent": (
        "from paceenv.live import agent, reporting; import paceenv.live.live_command;"
        "from paceenv.live.record import recorder, prometheus, merge_segments",
        SIMULATOR,
    ),
    "attach": (
        "from paceenv.live import attach; from paceenv.live.record import housekeeping, recorder",
        SIMULATOR | {"pyarrow", "pandas", "prometheus_client", "typer", "rich", "yaml"},
    ),
    "policy file": (
        "import pickle; pickle.load = pickle.loads = pickle.Unpickler = None  # data only\n"
        "from numpy import zeros; from paceenv.policies import names, policy_file\n"
        "policy = policy_file.load_policy(names.released()).policy\n"
        "policy.reset(1); policy.act(zeros((1, 10), 'f4'))",
        {"torch", "numba", "gymnasium", "pydantic", "ray", "stable_baselines3"},
    ),
    "pacing of a cluster": (
        "from paceenv.live.decide.live_policy import find_policy;"
        f"assert not find_policy('static:{ROOT}/configs/clusters/unequal-slack.yaml').fault",
        {"pydantic", "numba", "gymnasium", "scipy"},
    ),
    "no sweep": (
        "import paceenv.live, paceenv.envs.pacing_env, paceenv.policies.select;"
        "from paceenv.trainers.evaluation import evaluate_command, static_search;"
        "from paceenv.trainers.sweep import sweep_command, sweep_results",
        {"ray", "optuna"},
    ),
}
"""By what is done: its code, and what it must not load."""


@pytest.mark.parametrize("what", LIGHT)
def test_nothing_is_loaded_that_is_not_needed(what: str) -> None:
    code, forbidden = LIGHT[what]
    command = [sys.executable, "-c", f"{code}\nimport sys; print('LOADED', *sys.modules)"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not forbidden & set(printed.rpartition("LOADED")[2].split())
