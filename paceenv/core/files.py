"""Files: configs found by name or path and read as YAML; files written completely or not at all."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from paceenv.core.errors import InputError
from paceenv.core.renames import RENAMED_CONFIGS, new_name

YAML_SUFFIXES = (".yaml", ".yml")


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` to ``path`` and create its folder. On any failure the old file stays and nothing else is left.

    Raises InputError where the system refuses (no permission, disk full).
    """
    with open_atomic(path) as file:
        file.write(content)


@contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """As :func:`atomic_write`, for content that comes in pieces: a file that replaces ``path`` on a clean exit."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None
        raise


def packaged(kind: str) -> Path:
    """The folder ``configs/<kind>`` that ships with paceenv."""
    return Path(str(importlib.resources.files("paceenv.configs"))) / kind


def names(kind: str) -> list[str]:
    """Names of the packaged configs of a kind ("clusters", "suites", "train", ...)."""
    return sorted(p.stem for p in packaged(kind).glob("*.yaml"))


def find(kind: str, name: str | os.PathLike[str]) -> Path:
    """The file of a config, given as a path or as a name in ``configs/<kind>``. Raises InputError if it is missing."""
    path = Path(name)
    if path.suffix in YAML_SUFFIXES or os.sep in str(name):
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        return path
    name = new_name(str(name), RENAMED_CONFIGS.get(kind, {}), f"configs/{kind}")
    candidate = packaged(kind) / f"{name}.yaml"
    if candidate.is_file():
        return candidate
    known = names(kind)
    close = difflib.get_close_matches(str(name), known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InputError(f"{name}: neither a file nor one of configs/{kind}: {', '.join(known)}{hint}")


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A YAML mapping from a file; data only (``safe_load``). Raises InputError for anything else."""
    import yaml  # only here: importing the live agent must not load it

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return data
