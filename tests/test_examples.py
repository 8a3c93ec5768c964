"""Every example runs, in small, and says what its docstring promises; the index lists them all."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from paceenv.policies.policy_file import load_policy

EXAMPLES = Path(__file__).parents[1] / "examples"


Run = Callable[..., tuple[Any, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an example with some arguments; what it returned and printed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def runs(name: str, *arguments: str) -> tuple[Any, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library that an example shows may warn about itself
            found = importlib.import_module(name).main(list(arguments))
        return found, capsys.readouterr().out

    return runs


def test_the_index_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(\1\)", page, re.MULTILINE)
    there = [path.name for kind in ("*.py", "*.ipynb") for path in EXAMPLES.glob(kind)]
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sb3_ppo", ["--timesteps", "512", "--rows", "8"]),
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


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    book = nbformat.read(EXAMPLES / "diagnosis.ipynb", as_version=4)
    shown = texts(book)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(book, timeout=240, kernel_name="python3").execute()
    assert texts(book) == shown
    assert "communication contention" in shown


def texts(book: Any) -> str:
    """What the cells of a notebook print, without evidence and advice, whose words change with the diagnosis."""
    outputs = [o for cell in book.cells if cell.cell_type == "code" for o in cell.outputs]
    text = "".join(o["text"] for o in outputs if o.output_type == "stream" and o.name == "stdout")
    return "\n".join(line for line in text.splitlines() if not line.startswith(("  seen:", "  advice:")))
