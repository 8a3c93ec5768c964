"""The documentation does what it says: its blocks run, its commands exist, its reference is made from the code."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from page_blocks import ROOT, blocks, differing_lines, lay_out_tools

sys.path.insert(0, str(ROOT / "docs"))

import site_pages
from site_pages import command_pages, config_pages

from paceenv.core import pacing

DOCS = sorted((ROOT / "docs").rglob("*.md"))
RUN = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
"""Pages of which every block runs, or says why it does not."""
QUICK = {"index.md"}
TRAINED = "paceenv train demo"
"""What the page on training asks for takes a minute: here less, so that its numbers are others."""
README_WORDS = 620
COMMANDS = dict(command_pages.commands())
FACE = (
    *("paceenv/envs/pacing_env.py", "paceenv/envs/registration.py"),
    *("paceenv/core/pacing.py", "paceenv/core/signals.py", "paceenv/core/trace.py"),
    *("policies/base.py", "policies/policy_file.py", "live/agent.py"),
)
"""Environments, the four contracts, and what attaches to a job: every parameter is described. Inside, a docstring
says what the name does not."""


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[] if p.name in QUICK else pytest.mark.slow, id=p.stem) for p in RUN]
)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    environ = lay_out_tools(tmp_path)
    script = []  # one shell for the page, as its reader has: a job of one block may be awaited in a later one
    for k, block in enumerate(blocks(page.read_text())):
        assert block.language in {"sh", "python", "text"}, block.text
        if not block.is_run or block.language == "text":
            continue
        if block.language == "sh":
            script.append(block.text)
        else:
            named = re.match(r"# file: (\S+)\n", block.text)
            path = tmp_path / (named[1] if named else f"block{k}.py")
            path.write_text(block.text)
            script += [] if named else [f"python {path.name}\n"]
    whole = "".join(script)
    (tmp_path / "page.sh").write_text(whole.replace(TRAINED, f"{TRAINED} --set total_timesteps=16000"))
    ended = commands.run(["bash", "-ex", "page.sh"], cwd=tmp_path, env=environ, deadline_s=900.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if page.stem != "deploy" and TRAINED not in whole:  # the former times a real job
        shown = [block.text for block in blocks(page.read_text()) if block.is_run and block.language == "text"]
        assert [line for text in shown for line in differing_lines(text, ended.stdout)] == []


def test_the_glossary_says_what_each_rule_compares() -> None:
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    for one in pacing.DEFINITIONS:
        assert f"| `{one.name}` | {one.compares} |" in glossary


def test_the_table_of_versions_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(re.fullmatch(r"([a-z0-9-]+)[^>]*(.*)", one).groups() for extra in  # type: ignore[union-attr,misc]
                 project["optional-dependencies"].values() for one in extra)  # fmt: skip
    asked["python"] = project["requires-python"]
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]+) \|$",
                      (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) == 5
    for name, least, below, tested in rows:
        assert asked[name] == f">={least}" + (f",<{below}" if below else ""), name
        assert f"\n{name}=={tested}\n" in pins or (name == "python" and f"# linux, python {tested}." in pins), name


def _command_lines() -> list[tuple[Path, str]]:
    """Every line of every page that begins with ``paceenv``."""
    found = []
    for page in [*RUN[:1], *DOCS]:
        for block in blocks(page.read_text()):
            text = re.sub(r"\\\n", " ", block.text)
            if block.language == "sh":
                found += [(page, line) for line in re.findall(r"^ *(paceenv [a-z].*)$", text, re.MULTILINE)]
    return found


def _known(words: list[str]) -> tuple[Any, list[str]]:
    """The command of a line, the longest name that fits, and the words after it."""
    for length in (3, 2):
        if (name := " ".join(words[:length])) in COMMANDS:
            return COMMANDS[name], words[length:]
    return None, words


def test_every_command_on_every_page_exists_with_its_options() -> None:
    lines = _command_lines()
    assert len(lines) > 60
    wrong = []
    for page, line in lines:
        words = shlex.split(line.partition(" -- ")[0], comments=True)
        command, rest = _known(words)
        options = {name for p in getattr(command, "params", []) for name in (*p.opts, *p.secondary_opts)}
        if "run" in getattr(command, "commands", {}):  # the word may be left out
            options |= {name for p in command.commands["run"].params for name in p.opts}
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - {"--help"}
        if not getattr(command, "context_settings", {}).get(
            "allow_interspersed_args", True
        ):  # it hands them on to a launcher
            given = set()
        if command is None or given - options:
            wrong.append(f"{page.relative_to(ROOT)}: {line}: {given - options if command else 'no such command'}")
    assert wrong == []


def test_every_mark_is_made_and_everything_made_is_on_a_page() -> None:
    marks = [name for page in DOCS for name in site_pages.MARK.findall(page.read_text())]
    assert sorted(marks) == sorted(site_pages.MAKERS)


def test_every_option_of_every_command_is_described() -> None:
    without = [
        (name, parameter.name)
        for name, command in COMMANDS.items()
        for parameter in command.params
        if parameter.name != "help" and not parameter.help and not getattr(parameter, "hidden", False)
    ]
    assert without == []


def test_every_config_key_has_a_meaning() -> None:
    without = {
        f"{one.__name__}.{key}"
        for model, _, _ in config_pages.KINDS.values()
        for _, one, rows in config_pages.keys(model)
        for key, _, _, _, meaning in rows
        if not meaning
    }
    assert without == set()


def test_the_readme_reads_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_the_map_leads_from_lines_of_the_readme_to_files() -> None:
    page = (ROOT / "docs" / "explanation" / "structure.md").read_text()
    readme = (ROOT / "README.md").read_text().replace("`", "")
    rows = re.findall(r"^\| (.+) \| (`.+) \|$", page.partition("## One import root")[0], re.MULTILINE)
    assert len(rows) > 10
    assert [said for said, _ in rows if said.replace("`", "") not in readme] == []
    assert [name for _, files in rows for name in re.findall("`(.+?)`", files) if not (ROOT / name).exists()] == []


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Every public function and method of a module with a docstring: its name, itself, and what is said of it."""
    for owner in ast.parse(path.read_text()).body:
        body = owner.body if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_") else [owner]
        of_class = (ast.get_docstring(owner) or "") if isinstance(owner, ast.ClassDef) else ""
        for one in body:
            if isinstance(one, ast.FunctionDef) and (not one.name.startswith("_") or one.name == "__init__"):
                said = (ast.get_docstring(one) or "") + (of_class if one.name == "__init__" else "")
                if said and not any("overload" in ast.unparse(name) for name in one.decorator_list):
                    yield f"{path.name}: {one.name}", one, said


def test_every_parameter_of_the_public_face_is_described() -> None:
    """``name: meaning``, as under ``Args:``, or as a point of a list."""
    found = [one for name in FACE for one in functions(ROOT / name)]
    assert len(found) > 30
    without = [
        (name, parameter.arg)
        for name, function, said in found
        for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if parameter.arg not in {"self", "cls"}
        and not re.search(rf"^\s*(?:\* )?`{{0,2}}\*{{0,2}}{parameter.arg}`{{0,2}}:\s", said, re.MULTILINE)
    ]
    assert without == []
