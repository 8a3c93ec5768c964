"""What a release is made of, and what an installation adds: pins, citation, container files; one import name, every
file that is needed, nothing that breaks a user's repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from commands import ROOT, run
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from paceenv import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_in(python: Path, *arguments: str, folder: Path) -> str:
    """Run the interpreter of an environment in ``folder``; returns what it printed and fails where it fails."""
    names = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PACEENV"))}
    ended = run([python, *arguments], cwd=folder, env=inherited | names)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def needed_by(name: str, extra: str = "") -> list[str]:
    """Names of what a distribution needs with an extra."""
    found = map(Requirement, metadata.requires(name) or [])
    return [one.name for one in found if not one.marker or one.marker.evaluate({"extra": extra})]


def files(distributions: list[str]) -> set[str]:
    """Top-level entries of distributions and of all that they need."""
    entries, left, seen = set[str](), list(distributions), set[str]()
    while left:
        name = left.pop().lower().replace("_", "-")
        if name not in seen:
            seen.add(name)
            entries |= {path.parts[0] for path in metadata.distribution(name).files or () if path.parts[0] != ".."}
            left += needed_by(name)
    return entries


def environment(folder: Path, wheel: Path, wanted: set[str] | None = None) -> Path:
    """The interpreter of a fresh environment with the wheel and links to all packages of this one, or those wanted."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for here in filter(Path.is_dir, map(Path, site.getsitepackages())):
        for entry in here.iterdir():
            ours = "paceenv" in entry.name or entry.suffix == ".pth"
            if not ours and (wanted is None or entry.name in wanted) and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    options = ("--disable-pip-version-check", "--no-input", "--no-deps", "--no-index", "--no-build-isolation")
    ended = run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return python


def build(kind: str, source: Path, folder: Path) -> Path:
    """Have the build backend make a ``wheel`` or an ``sdist`` of ``source``, as pip does; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    ended = run([sys.executable, "-c", command, folder], cwd=source)
    assert ended.returncode == 0, ended.stderr
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the checkout, links kept, without what is made in it."""
    made = (".git", ".venv", "runs", "shared", "build", "dist", "*.egg-info", ".*_cache", "__pycache__")
    copy, ignore = tmp_path_factory.mktemp("checkout") / "paceenv", shutil.ignore_patterns(*made)
    return Path(shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel beside everything that it can need."""
    return environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="module")
def production(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel beside what the extra ``live`` brings."""
    return environment(tmp_path_factory.mktemp("production"), wheel, files(needed_by("paceenv", "live")))


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of the files of a wheel, less its list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist() if not one.filename.endswith("/RECORD")}


def test_the_wheel_has_one_name_every_module_and_the_data(wheel: Path) -> None:
    ours, packed = ROOT / "paceenv", contents(wheel)
    assert {name.split("/")[0] for name in packed} == {"paceenv", f"paceenv-{__version__}.dist-info"}
    for pattern in ("configs/**/*.yaml", "policies/learned.safetensors"):
        wanted = {f"paceenv/{path.relative_to(ROOT)}" for path in ROOT.glob(pattern)}
        assert wanted
        assert wanted <= set(packed)
    assert "paceenv/report/page.html.j2" in packed
    modules = {path.relative_to(ROOT) for path in ours.rglob("*.py")}
    for link in (path for path in ours.iterdir() if path.is_symlink()):
        modules |= {Path("paceenv") / path.relative_to(ROOT) for path in link.resolve().rglob("*.py")}
    assert {name for name in packed if name.endswith(".py")} == {str(path) for path in modules}


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert contents(build("wheel", tmp_path / f"paceenv-{__version__}", tmp_path / "wheel")) == contents(wheel)


FIND = "from importlib.util import find_spec; print([n for n in {} if find_spec(n)])"


def test_no_module_has_another_name(installed: Path, tmp_path: Path) -> None:
    """Folders of the project, and folders and modules of the package."""
    inside = {path.stem for path in (ROOT / "paceenv").iterdir()} - {"__init__", "__pycache__"}
    others = {name for name, owners in metadata.packages_distributions().items() if set(owners) != {"paceenv"}}
    names = sorted((inside | {"benchmarks", "configs", "live", "policies", "tests", "trainers"}) - others)
    assert run_in(installed, "-c", FIND.format([*names, "paceenv"]), folder=tmp_path).strip() == "['paceenv']"


def test_a_production_node_has_no_simulator(production: Path, tmp_path: Path) -> None:
    never = ["gymnasium", "matplotlib", "numba", "pydantic", "ray", "scipy", "stable_baselines3"]
    assert run_in(production, "-c", FIND.format(never), folder=tmp_path).strip() == "[]"


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


def losses(folder: Path) -> tuple[list[float], bool]:
    """What the training script found: its losses, and whether the agent was there."""
    found = json.loads((folder / "result.json").read_text())
    assert found["others"] == [3.1, 1.1, 4.1, 2.1]
    return found["losses"], found["agent"]


@pytest.mark.slow
def test_a_repository_with_folders_like_ours_trains_as_ever(installed: Path, production: Path, tmp_path: Path) -> None:
    """Without the agent, and with it on a machine that has only what the extra ``live`` brings."""
    for k, name in enumerate(("configs", "policies", "trainers", "live", "tests")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "base.py").write_text(f"LR = {0.1 + k}\n")
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "train.py").write_text(TRAIN)
    run_in(installed, "train.py", folder=tmp_path)
    alone, agent = losses(tmp_path)
    assert not agent
    run_in(production, "-m", "paceenv.live", "--out", "run", "train.py", folder=tmp_path)
    assert losses(tmp_path) == (alone, True)
    [status] = (tmp_path / "run").rglob("rank*.json")
    assert json.loads(status.read_text())["iterations"] == 20


def test_every_pin_installs_on_the_oldest_python_that_is_promised() -> None:
    """Also on its first patch release: distributions keep 3.11.2 for years, and a pin may ask for 3.11.5."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    found = {one.metadata["Name"]: one.metadata["Requires-Python"] or "" for one in metadata.distributions()}
    needs = {name: need for name, need in found.items() if name in pins}
    assert len(needs) > 100
    assert {name: need for name, need in needs.items() if not SpecifierSet(need).contains(oldest)} == {}


def test_the_citation_is_of_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found)  # what the format requires
    assert (found["cff-version"], found["type"], found["version"]) == ("1.2.0", "software", __version__)
    assert all(set(author) in ({"name"}, {"family-names", "given-names"}) for author in found["authors"])


@pytest.mark.parametrize("path", sorted((ROOT / "containers").glob("*.Containerfile")), ids=lambda path: path.stem)
def test_container_files_are_sound(path: Path) -> None:
    """Known instructions, shell that parses, files that are there, an extra that exists, no root at the end."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")  # continued lines joined
    found = [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]
    known = {*("ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD")}
    assert {name for name, _ in found} <= known
    for name, rest in found:
        if name == "RUN":
            assert run(["bash", "-n", "-c", rest]).returncode == 0
        if name == "COPY":
            assert [source for source in rest.split()[:-1] if source != "dist/*.whl"] == ["constraints.txt"]
    named = {rest.partition("=")[0]: rest.partition("=")[2] for name, rest in found if name == "ARG"}
    assert named.get("EXTRA", "live") in PROJECT["optional-dependencies"]
    assert [rest for name, rest in found if name == "USER"][-1] != "root"
