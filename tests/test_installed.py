"""What an installation adds: one import name, every file that is needed, nothing that breaks a user's repository."""

from __future__ import annotations

import json
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from installations import Environment, build, copy_sources, environment, requirements, training_repository

from paceenv import __version__

ROOT = Path(__file__).resolve().parents[1]
LIVE_NEVER_NEEDS = ("gymnasium", "matplotlib", "numba", "pydantic", "ray", "scipy", "stable_baselines3")
DATA = ("configs/**/*.yaml", "policies/learned.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(ROOT, tmp_path_factory.mktemp("checkout") / "paceenv")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel beside everything that it can need."""
    made = environment(tmp_path_factory.mktemp("installed"))
    made.install(wheel)
    return made


@pytest.fixture(scope="module")
def production(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel beside what the extra ``live`` brings."""
    made = environment(tmp_path_factory.mktemp("production"), requirements("live"))
    made.install(wheel)
    return made


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of the files of a wheel, less its list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist() if not one.filename.endswith("/RECORD")}


def test_the_wheel_has_one_name_every_module_and_the_data(wheel: Path) -> None:
    assert {name.split("/")[0] for name in contents(wheel)} == {"paceenv", f"paceenv-{__version__}.dist-info"}
    for pattern in DATA:
        wanted = {f"paceenv/{path.relative_to(ROOT)}" for path in ROOT.glob(pattern)}
        assert wanted
        assert wanted <= set(contents(wheel))
    ours = ROOT / "paceenv"
    assert "paceenv/report/page.html.j2" in contents(wheel)
    modules = {path.relative_to(ROOT) for path in ours.rglob("*.py")}
    for link in (path for path in ours.iterdir() if path.is_symlink()):
        modules |= {Path("paceenv") / path.relative_to(ROOT) for path in link.resolve().rglob("*.py")}
    assert {name for name in contents(wheel) if name.endswith(".py")} == {str(path) for path in modules}


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert contents(build("wheel", tmp_path / f"paceenv-{__version__}", tmp_path / "wheel")) == contents(wheel)


def test_no_module_has_another_name(installed: Environment, tmp_path: Path) -> None:
    """Folders of the project, and folders and modules of the package."""
    inside = {path.stem for path in (ROOT / "paceenv").iterdir()} - {"__init__", "__pycache__"}
    others = {name for name, owners in metadata.packages_distributions().items() if set(owners) != {"paceenv"}}
    names = sorted((inside | {"benchmarks", "configs", "live", "policies", "tests", "trainers"}) - others)
    code = f"from importlib.util import find_spec; print([n for n in {[*names, 'paceenv']} if find_spec(n)])"
    assert installed.run("-c", code, folder=tmp_path).strip() == "['paceenv']"


def losses(folder: Path) -> tuple[list[float], bool]:
    """What the training script found: its losses, and whether the agent was there."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert found["others"] == [3.1, 1.1, 4.1, 2.1]
    return found["losses"], found["agent"]


@pytest.mark.slow
def test_a_repository_with_folders_like_ours_trains_as_ever(
    installed: Environment, production: Environment, tmp_path: Path
) -> None:
    """Without the agent, and with it on a machine that has only what the extra ``live`` brings."""
    repository = training_repository(tmp_path / "mine")
    installed.run("train.py", folder=repository)
    alone, agent = losses(repository)
    assert not agent
    production.run("-m", "paceenv.live", "--out", "run", "train.py", folder=repository)
    assert losses(repository) == (alone, True)
    [status] = (repository / "run").rglob("rank*.json")
    assert json.loads(status.read_text())["iterations"] == 20


def test_a_production_node_has_no_simulator(production: Environment, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print([n for n in {LIVE_NEVER_NEEDS} if find_spec(n)])"
    assert production.run("-c", code, folder=tmp_path).strip() == "[]"
