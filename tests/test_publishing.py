"""What a release is made of: version, changelog, citation, issue forms, container files, plain progress."""

from __future__ import annotations

import importlib.metadata
import re
import time
import tomllib
from pathlib import Path

import commands
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from paceenv import __version__
from paceenv.ui import output

ROOT = Path(__file__).resolve().parents[1]
CONTAINERS = sorted((ROOT / "containers").glob("*.Containerfile"))
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


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


def test_silent_work_is_reported_on_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "FIRST_S", 0.01)
    said = ""
    with output.progress("work", 4.0) as done:
        done(0.0)
        done(1.0)
        deadline_s = time.monotonic() + 60.0
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert re.fullmatch(r"work: 25 %, \d+ s so far, about \d+ s left\n", said), "the next line comes ten seconds later"


def test_the_time_left_does_not_count_what_came_before_the_first_report() -> None:
    marks = [(100.0, 1.0), (110.0, 2.0)]
    assert output.progress_line("work", marks, 4.0, 0.0, 110.0) == "work: 50 %, 1 min 50 s so far, about 20 s left"
