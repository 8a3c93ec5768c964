"""docs/how-to/recipes.md as it stands there: its scripts and commands are taken from the page and run."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import commands
import pytest
import yaml
from page_blocks import ROOT, lay_out_tools

PAGE = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
HEADINGS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


def blocks(heading: str, language: str) -> list[str]:
    """The fenced blocks of a language below a heading of the page."""
    (section,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"{heading}\n")]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


def named_files() -> dict[str, str]:
    """Every file that the page shows, by its name."""
    found = {}
    for text in re.findall(r"^```\w+\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL):
        if name := re.search(r"^# file: (\S+)$", text, re.MULTILINE):
            assert name[1] not in found
            found[name[1]] = text
    return found


def lay_out(folder: Path) -> dict[str, str]:
    """Put the page's files and its tools into ``folder``, on a free port; returns the environment to run them in."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for name, text in named_files().items():
        (folder / name).write_text(text.replace("29500", port))
    return lay_out_tools(folder)


def run(command: str, folder: Path, environ: dict[str, str]) -> str:
    ended = commands.run(["bash", "-e", "-c", command], cwd=folder, env=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def assert_named(folder: Path, ranks: int) -> None:
    """Rank 1, and it alone, is late by about the 20 ms that it sleeps."""
    page = (folder / "summary.txt").read_text()
    (late_ms,) = re.findall(r"^  rank 1 \(.*\) is late by ([\d.]+) ms", page, re.MULTILINE)
    assert 16 <= float(late_ms) <= 30, page
    assert len(re.findall(r"is late by", page)) == 1, page
    assert len(list(folder.glob("*/rank*.json"))) == ranks


def test_every_recipe_of_the_table_is_there_and_its_blocks_parse() -> None:
    rows = re.findall(r"^\| \[.*?\]\(#([\w.-]+)\)", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in HEADINGS}
    assert set(rows) == anchors
    for name, text in named_files().items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith(".sbatch"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for heading in HEADINGS:
        for text in blocks(heading, "sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_every_option_on_the_page_is_one_of_the_agent() -> None:
    from paceenv.live.options import OPTIONS

    known = {f"--{option.name.replace('_', '-')}" for option in OPTIONS} | {"--policy", "--wait"}
    manifest = yaml.safe_load(named_files()["pytorchjob.yaml"])
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        *options, script = container["args"]
        assert {option.partition("=")[0] for option in options} <= known
        assert script == "train.py"
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert all(path.startswith(tuple(mounts)) for path in re.findall(r"=(/\S+)", " ".join(options)))
    asked = set()
    for line in re.sub(
        r"\\\n", "", "".join(text for heading in HEADINGS for text in blocks(heading, "sh"))
    ).splitlines():
        agent = line.partition("-m paceenv.live ")[2].partition(" -m ")[0]
        asked |= set(re.findall(r"(?:^| )(--[\w-]+)", agent))
    assert {"--out", "--kill-file"} <= asked <= known


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["torchrun", "Hugging Face Trainer", "Lightning"])
def test_a_recipe_names_the_slow_rank(heading: str, tmp_path: Path) -> None:
    """By the launcher, and by the trainer's callback where it has one."""
    environ = lay_out(tmp_path)
    for command in blocks(heading, "sh"):
        assert "rank 1" in run(command, tmp_path, environ)
        (folder,) = re.findall(r"^paceenv diagnose (\S+)$", command, re.MULTILINE)
        assert_named(tmp_path / folder, 2)
