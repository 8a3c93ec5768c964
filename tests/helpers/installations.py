"""Environments in which paceenv is installed as users install it, and training repositories beside it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import commands
from packaging.requirements import Requirement

OWN_FOLDERS = ("configs", "policies", "trainers", "live", "tests")
"""Folders of the training repository that are called like folders of ours."""
TRAIN = """
import json, sys
from configs.base import LR
import live.base, policies.base, tests.base, trainers.base
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(torch.ones(8, 4)) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
others = [m.LR for m in (live.base, policies.base, tests.base, trainers.base)]
agent = "paceenv.live.agent" in sys.modules
with open("result.json", "w") as file:
    json.dump({"losses": losses, "others": others, "agent": agent}, file)
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *arguments: str | Path, folder: Path) -> str:
        """Run its interpreter in ``folder``; returns what it printed and fails where it fails."""
        names = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PACEENV"))}
        ended = commands.run([self.python, *map(str, arguments)], cwd=folder, env=inherited | names)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def install(self, *arguments: str | Path) -> None:
        """``pip install`` into it, without looking for anything elsewhere."""
        options = ("--disable-pip-version-check", "--no-input", "--no-deps", "--no-index", "--no-build-isolation")
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", *options, *map(str, arguments)]
        ended = commands.run(command)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def environment(folder: Path, distributions: Iterable[str] | None = None) -> Environment:
    """A fresh environment with links to the packages of this one, paceenv left out.

    Args:
        folder: Where to make it.
        distributions: Names of what is needed; what these need comes too. Default: everything.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for here in map(Path, site.getsitepackages()):
        wanted = None if distributions is None else _files(distributions)
        for entry in here.iterdir() if here.is_dir() else ():
            ours = "paceenv" in entry.name or entry.suffix == ".pth"
            if not ours and (wanted is None or entry.name in wanted) and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return Environment(folder)


def requirements(extra: str) -> list[str]:
    """Names of what paceenv needs with an extra."""
    found = map(Requirement, metadata.requires("paceenv") or [])
    return [one.name for one in found if not one.marker or one.marker.evaluate({"extra": extra})]


def _files(distributions: Iterable[str]) -> set[str]:
    """Top-level entries of distributions and of all that they need."""
    entries, left, seen = set[str](), list(distributions), set[str]()
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        entries |= {path.parts[0] for path in found.files or () if path.parts[0] != ".."}
        needed = map(Requirement, found.requires or [])
        left += [one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
    return entries


def copy_sources(root: Path, folder: Path) -> Path:
    """The files of a checkout, links kept, without what is made in it."""
    made = shutil.ignore_patterns(
        ".git", ".venv", "runs", "shared", "build", "dist", "*.egg-info", ".*_cache", "__pycache__"
    )
    return Path(shutil.copytree(root, folder, symlinks=True, ignore=made))


def build(kind: str, source: Path, folder: Path) -> Path:
    """Have the build backend make a ``wheel`` or an ``sdist`` of ``source``, as pip does; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    ended = commands.run([sys.executable, "-c", command, folder], cwd=source)
    assert ended.returncode == 0, ended.stderr
    [built] = folder.iterdir()
    return built


def training_repository(folder: Path) -> Path:
    """A repository with a training script and packages of its own named like ours."""
    for k, name in enumerate(OWN_FOLDERS):
        (folder / name).mkdir(parents=True)
        (folder / name / "base.py").write_text(f"LR = {0.1 + k}\n")
        (folder / name / "__init__.py").touch()
    (folder / "train.py").write_text(TRAIN)
    return folder
