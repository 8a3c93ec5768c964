"""What lies under the paths that a user names: recordings, folders of live runs, configs and policy files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from paceenv.core.errors import InputError
from paceenv.core.files import YAML_SUFFIXES, read_yaml
from paceenv.importers.file_list import list_files
from paceenv.live.record.run_folder import ATTEMPT

Kind = Literal["cluster", "scenario", "suite", "training", "sweep", "target", "measurements", "comparison"]
_KEYS: Final[tuple[tuple[Kind, frozenset[str]], ...]] = (
    ("cluster", frozenset({"job", "fabric"})),
    ("scenario", frozenset({"network", "jobs"})),
    ("training", frozenset({"environment"})),
    ("measurements", frozenset({"paceenv_noise_measurements"})),
    ("comparison", frozenset({"policies", "tuned"})),
    ("target", frozenset({"name", "rows"})),
)
"""Keys that a config of a kind has."""
_SUITE_KEYS: Final = frozenset({"cases", "random", "relatives", "posterior"})
_SWEEP_KEYS: Final = frozenset({"static", "ppo", "robustness"})
NEXT: Final[dict[Kind, str]] = {
    "cluster": "paceenv simulate {}",
    "scenario": "paceenv testbed run {}",
    "suite": "paceenv evaluate learned adaptive --suite {}",
    "training": "paceenv train {} -o runs/mine",
    "sweep": "paceenv sweep {} -o runs/sweep",
    "target": "paceenv validate {}",
    "measurements": "paceenv calibrate {} -o cluster.yaml",
    "comparison": "paceenv evaluate {}",
}
"""The command that takes a config of a kind."""


@dataclass(frozen=True)
class Recognised:
    """What was found, in the order of the paths.

    Attributes:
        recorded: files for ``paceenv.importers.inputs``, which knows their formats.
        runs: folders of live runs.
        configs: configs of this project, with their kinds.
        policies: policy files.
    """

    recorded: tuple[Path, ...]
    runs: tuple[Path, ...]
    configs: tuple[tuple[Kind, Path], ...]
    policies: tuple[Path, ...]

    def next_steps(self) -> list[str]:
        """A command for each config and policy file."""
        steps = [NEXT[kind].format(shlex.quote(str(path))) for kind, path in self.configs]
        return steps + [f"paceenv explain {shlex.quote(str(path))}" for path in self.policies]


def recognise(paths: Sequence[str | Path]) -> Recognised:
    """Look at what lies there, recordings unread.

    Args:
        paths: files, folders and patterns.

    Raises:
        InputError: nothing is there.
    """
    files = list_files(paths)
    runs = dict.fromkeys(run for path in files if (run := _run_of(path)) is not None)
    recorded: list[Path] = []
    configs: list[tuple[Kind, Path]] = []
    policies: list[Path] = []
    for path in files:
        if any(run in path.absolute().parents for run in runs):
            continue
        kind = _kind_of(path) if path.suffix in YAML_SUFFIXES else None
        if kind is not None:
            configs.append((kind, path))
        elif path.suffix == ".safetensors":
            policies.append(path)
        else:
            recorded.append(path)
    return Recognised(tuple(recorded), tuple(runs), tuple(configs), tuple(policies))


def _run_of(path: Path) -> Path | None:
    """The folder of the live run that a file belongs to."""
    for folder in path.absolute().parents:
        if ATTEMPT.fullmatch(folder.name):
            return folder.parent
    return None


def _kind_of(path: Path) -> Kind | None:
    """The kind of a config by its keys; None for YAML of others, such as the metadata beside a trace."""
    try:
        keys = read_yaml(path).keys()
    except InputError:
        return None
    if "name" in keys and keys & _SUITE_KEYS:
        return "suite"
    found = next((kind for kind, wanted in _KEYS if wanted <= keys), None)
    return found or ("sweep" if "name" in keys and keys & _SWEEP_KEYS else None)
