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


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """``pip install -e``, as ``make setup`` does."""
    made = environment(tmp_path_factory.mktemp("editable"))
    made.install("-e", source)
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


@pytest.mark.parametrize("how", ["installed", pytest.param("editable", marks=pytest.mark.slow)])
def test_no_module_has_another_name(how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Folders of the project, and folders and modules of the package."""
    inside = {path.stem for path in (ROOT / "paceenv").iterdir()} - {"__init__", "__pycache__"}
    others = {name for name, owners in metadata.packages_distributions().items() if set(owners) != {"paceenv"}}
    names = sorted((inside | {"benchmarks", "configs", "live", "policies", "tests", "trainers"}) - others)
    code = f"from importlib.util import find_spec; print([n for n in {[*names, 'paceenv']} if find_spec(n)])"
    assert request.getfixturevalue(how).run("-c", code, folder=tmp_path).strip() == "['paceenv']"


def losses(folder: Path, rank: str = "") -> tuple[list[float], bool]:
    """What the training script found: its losses, and whether the agent was there."""
    found: dict[str, Any] = json.loads((folder / f"result{rank}.json").read_text())
    assert found["others"] == [3.1, 1.1, 4.1, 2.1]
    return found["losses"], found["agent"]


LAUNCHER = ("-m", "paceenv.live", "--out", "run")


@pytest.mark.slow
def test_a_repository_with_folders_like_ours_trains_as_ever(
    installed: Environment, production: Environment, tmp_path: Path
) -> None:
    """Without the agent, and with it on a machine that has only what the extra ``live`` brings."""
    repository = training_repository(tmp_path / "mine")
    installed.run("train.py", folder=repository)
    alone, agent = losses(repository)
    assert not agent
    production.run(*LAUNCHER, "train.py", folder=repository)
    assert losses(repository) == (alone, True)
    [status] = (repository / "run").rglob("rank*.json")
    assert json.loads(status.read_text())["iterations"] == 19


@pytest.mark.slow
def test_the_agent_and_the_environment_work_beside_them(installed: Environment, tmp_path: Path) -> None:
    """``live.attach`` and the registered environment in one script of a repository with packages named like ours."""
    repository = training_repository(tmp_path / "mine")
    installed.run("train.py", "--attach", "--gym", folder=repository, NUMBA_DISABLE_JIT="1")
    found, agent = losses(repository)
    assert len(found) == 20
    assert agent


@pytest.mark.slow
def test_torchrun_trains_them_with_the_agent(production: Environment, tmp_path: Path) -> None:
    repository = training_repository(tmp_path / "mine")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    production.run(*torchrun, *LAUNCHER, "train.py", folder=repository)
    (first, one), (second, two) = losses(repository, "0"), losses(repository, "1")
    assert first == second
    assert one
    assert two
    assert len(list((repository / "run").rglob("rank*.json"))) == 2


def test_a_production_node_has_no_simulator(production: Environment, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print([n for n in {LIVE_NEVER_NEEDS} if find_spec(n)])"
    assert production.run("-c", code, folder=tmp_path).strip() == "[]"


@pytest.mark.slow
def test_an_editable_installation_runs_the_files_that_people_open(editable: Environment, source: Path) -> None:
    """Also through the links in ``paceenv/``: tracebacks name them, and a debugger stops in them."""
    paths = ["paceenv/core/pacing.py", "policies/rules.py", "live/options.py"]
    modules = [path.removeprefix("paceenv/").removesuffix(".py").replace("/", ".") for path in paths]
    code = f"from importlib import import_module\nfor m in {modules}: print(import_module('paceenv.' + m).__file__)"
    assert editable.run("-c", code, folder=source.parent).splitlines() == [str(source / path) for path in paths]
    compiled = "import paceenv.policies.rules as m; print(m.__spec__.loader.get_code(m.__name__).co_filename)"
    assert editable.run("-c", compiled, folder=source.parent).strip() == str(source / "policies" / "rules.py")


@pytest.mark.slow
def test_a_breakpoint_stops_in_a_file_behind_a_link(editable: Environment, source: Path, tmp_path: Path) -> None:
    file = source / "policies" / "rules.py"
    line = next(k for k, text in enumerate(file.read_text().splitlines(), start=1) if text.startswith("class "))
    script = tmp_path / "stop_here.py"
    script.write_text("import paceenv.policies.rules\n")
    said = editable.run("-m", "pdb", script, folder=source, text=f"b {file}:{line}\nc\nq\n")
    assert f"Breakpoint 1 at {file}:{line}" in said
    assert f"> {file}({line})<module>()" in said
