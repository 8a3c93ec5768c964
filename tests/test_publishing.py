"""What a release is made of: version, changelog, citation, issue forms, container files, completion, plain progress."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import commands
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from paceenv import __version__
from paceenv.ui import output

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONTAINERS = sorted((ROOT / "containers").glob("*.Containerfile"))
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


def changelog_faults(text: str) -> list[str]:
    """Where a changelog is not in the form of keepachangelog.com."""
    faults, versions, section, sections = [], list[tuple[int, ...]](), "", list[str]()
    lines = text.splitlines()
    if lines[:1] != ["# Changelog"] or "https://keepachangelog.com" not in text:
        faults.append("no title, or no word about the form")
    for number, line in enumerate(lines, start=1):
        if line.startswith("## "):
            found = re.fullmatch(r"## \[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d{2}-\d{2}", line)
            if found:
                versions.append(tuple(map(int, found.groups())))
            elif line != "## [Unreleased]" or versions:
                faults.append(f"line {number}: {line}")
            section, sections = "", []
        elif line.startswith("### "):
            section = line[4:]
            if section not in SECTIONS or section in sections:
                faults.append(f"line {number}: {line}")
            sections.append(section)
        elif line.startswith("- ") and not section:
            faults.append(f"line {number}: an entry in no section")
    return faults + ["versions out of order"] * (versions != sorted(set(versions), reverse=True))


def test_the_changelog_has_the_usual_form() -> None:
    assert changelog_faults((ROOT / "CHANGELOG.md").read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## [Unreleased]", "## 0.1.0 (unreleased)"),
        ("### Added", "### The live agent"),
        ("### Security", "### Added"),
        ("### Added\n", ""),
        ("### Added", "### Added\n\n- x\n\n## [0.1.0] - 2026-01-02\n\n## [0.2.0] - 2026-01-01"),
        ("keepachangelog", "elsewhere"),
    ],
)
def test_another_form_is_found(old: str, new: str) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert changelog_faults(text.replace(old, new)) != []


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "paceenv.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_every_pin_installs_on_the_oldest_python_that_is_promised() -> None:
    """Also on its first patch release: distributions keep 3.11.2 for years, and a pin may ask for 3.11.5."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    needs = {
        found.metadata["Name"]: found.metadata["Requires-Python"] or ""
        for found in importlib.metadata.distributions()
        if found.metadata["Name"] in pins
    }
    assert len(needs) > 100
    assert {name: need for name, need in needs.items() if not SpecifierSet(need).contains(oldest)} == {}


def test_the_citation_is_of_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)  # what the format requires
    assert (found["cff-version"], found["type"], found["version"]) == ("1.2.0", "software", __version__)
    assert all(set(author) in ({"name"}, {"family-names", "given-names"}) for author in found["authors"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_what_github_reads(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for part in form["body"]:
        assert part["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert ("value" if part["type"] == "markdown" else "label") in part["attributes"]
        assert (part["type"] == "dropdown") == ("options" in part["attributes"])


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a container file, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_container_files_are_sound(path: Path) -> None:
    """Known instructions, shell that parses, files that are there, an extra that exists, no root at the end."""
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, rest in found:
        if name == "RUN":
            assert commands.run(["bash", "-n", "-c", rest]).returncode == 0
        if name == "COPY":
            assert [source for source in rest.split()[:-1] if source != "dist/*.whl"] == ["constraints.txt"]
    named = {rest.partition("=")[0]: rest.partition("=")[2] for name, rest in found if name == "ARG"}
    assert named.get("EXTRA", "live") in extras
    assert [rest for name, rest in found if name == "USER"][-1] != "root"


def completions(line: str) -> list[str]:
    """What bash is told for a line that ends at the cursor."""
    words = line.split(" ")
    asked = {"_PACEENV_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; from paceenv.cli.application import main; sys.argv[0] = 'paceenv'; main()"
    ended = commands.run([sys.executable, "-c", code], env=os.environ | asked | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_the_shell_completes_commands_found_by_entry_point() -> None:
    assert {"simulate", "sweep"} == set(completions("paceenv s"))
    assert completions("paceenv live stat") == ["status"]
    assert completions("paceenv live status --fa") == ["--fail-if"]
    assert "--mode" in completions("paceenv live run --nproc-per-node 2 --mo")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    code = "import sys; from paceenv.cli.application import main; main()"
    command = [sys.executable, "-c", code, "--show-completion", shell]
    ended = commands.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr
    assert "_PACEENV_COMPLETE" in ended.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=ended.stdout, text=True, timeout=60).returncode == 0


def test_silent_work_is_reported_on_plain_lines() -> None:
    said = list[str]()
    pace = output.Pace()
    with output.plain_progress("work", 4.0, write=said.append, pace=pace, first_s=0.01) as done:
        done(1.0)
        deadline_s = time.monotonic() + 60.0
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert len(said) == 1  # the next one would come after ten seconds
    assert re.fullmatch(r"work: 25 %, \d+ s so far, about \d+ s left", said[0])
    assert not pace.take(time.monotonic())
    assert pace.take(time.monotonic() + output.NEXT_S)


def test_work_that_is_done_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("work", 1) as done:
        done(1)
    with output.progress("work", 1, shown=False) as done:
        done(1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("share", "total", "took_s", "line"),
    [
        (0.0, 4.0, 20.0, "work: 20 s so far"),
        (1.0, None, 75.0, "work: 1 min 15 s so far"),
        (1.0, 4.0, 20.0, "work: 25 %, 20 s so far, about 60 s left"),
        (4.0, 4.0, 20.0, "work: 100 %, 20 s so far"),
    ],
)
def test_a_line_says_how_far_it_is(share: float, total: float | None, took_s: float, line: str) -> None:
    assert output.progress_line("work", share, total, took_s) == line


def test_the_script_that_builds_is_the_one_that_ci_runs() -> None:
    assert "make --no-print-directory dist" in (ROOT / ".ci" / "run").read_text()
    assert "@.ci/dist" in (ROOT / "Makefile").read_text()
    assert os.access(ROOT / ".ci" / "dist", os.X_OK)
    assert shutil.which("bash")
    found: Any = commands.run(["bash", "-n", ROOT / ".ci" / "dist"])
    assert found.returncode == 0, found.stderr
