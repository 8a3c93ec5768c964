"""Every example runs, in small, and says what its docstring promises; the index lists them all."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceenv.policies.policy_file import load_policy

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
MOST_LINES = 150


def load(name: str) -> ModuleType:
    """An example as a module of its own; what it imports from other libraries may warn."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


Run = Callable[..., tuple[Any, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with some arguments; what it returned and printed."""

    def runs(name: str, *arguments: str) -> tuple[Any, str]:
        module = load(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library that an example shows may warn about itself
            found = module.main(list(arguments))
        return found, capsys.readouterr().out

    return runs


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_one_short_file_that_says_what_it_shows(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    documentation = ast.get_docstring(ast.parse(text)) or ""
    assert "You learn" in documentation
    assert re.search(r"\bprints?\b", documentation), "it says what it prints"
    assert f"examples/{path.name}" in documentation, "it shows how it is run"


def test_the_index_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(\1\)", page, re.MULTILINE)
    there = [*(path.name for path in FILES), *(path.name for path in EXAMPLES.glob("*.ipynb"))]
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sb3_ppo", ["--timesteps", "512", "--rows", "8"]),
        ("sb3_sac", ["--timesteps", "512", "--rows", "8"]),
        ("cleanrl_ppo", ["--updates", "2", "--rows", "8"]),
        pytest.param("torchrl_ppo", ["--batches", "2", "--rows", "8"], marks=pytest.mark.slow),
        pytest.param("rllib_ppo", ["--iterations", "1", "--rows", "8"], marks=pytest.mark.slow),
    ],
)
def test_a_trainer_leaves_a_policy_file_and_scores_it(
    name: str, arguments: list[str], run: Run, tmp_path: Path
) -> None:
    file, printed = run(name, *arguments, "--seeds", "2", "-o", str(tmp_path / "policy.safetensors"))
    policy = load_policy(file).policy
    assert tuple(policy.mechanisms) == ("phase_shift",)
    assert len(re.findall(r"[+-]\d+\.\d+%", printed)) >= 3, printed
    assert f"wrote {file}" in printed


def test_a_policy_in_python_gains_where_it_can(run: Run) -> None:
    found, printed = run("policy_in_python", "--seeds", "4", "--iterations", "640")
    assert found["when-contended", "two-jobs"] > 0.02
    assert abs(found["when-contended", "one-job"]) < 0.005
    assert "when-contended" in printed


def test_a_search_scores_its_winner_on_fresh_seeds(run: Run) -> None:
    (_, fresh), printed = run("optuna_search", "--trials", "12", "--seeds", "2", "--iterations", "200")
    assert fresh > 0.0
    assert "fresh seeds" in printed


def test_ranks_that_hold_back_help_only_where_they_are_early(run: Run) -> None:
    gains, _ = run("pettingzoo_ranks", "--intervals", "8", "--seeds", "2")
    assert gains["nobody"] == 0.0
    assert gains["early ranks"] > 0.02 > gains["critical ranks"]


def test_offline_learning_beats_copying_the_data(run: Run) -> None:
    gains, printed = run("offline_td3_bc", "--episodes", "16", "--updates", "400", "--seeds", "4")
    assert gains["td3_bc"] > gains["bc"]
    assert "nothing can be learned about an action that was never taken" in printed
