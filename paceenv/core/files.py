"""Files: configs found by name or path and read as YAML; files written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import importlib.resources
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from paceenv.core.errors import InputError, did_you_mean

YAML_SUFFIXES = (".yaml", ".yml")
MAX_REPEATED = 10_000
"""Most parts of a YAML text that its aliases may repeat."""


def atomic_write(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write ``content`` to ``path`` and create its folder. On any failure the old file stays and nothing else is left.

    Raises InputError where the system refuses (no permission, disk full).
    """
    with open_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_file_name(path: str | os.PathLike[str]) -> None:
    """Raises InputError if a folder has this name, so that no file can be written there: ask before long work."""
    if os.path.isdir(path):  # "." and "/" are
        raise InputError(f"{path}: is a folder; allowed: the name of a file")


@contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """As :func:`atomic_write`, for content that comes in pieces: a file that replaces ``path`` on a clean exit."""
    target = Path(path)
    check_file_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not by `tempfile`, which makes files for their owner alone: the umask and default ACLs count. The umask can
        # only be read by changing it for all threads.
        temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None
        raise


def open_regular(path: str | os.PathLike[str], most_bytes: int) -> BinaryIO:
    """Open a file for reading; never waits for a writer, as a FIFO would, and follows no link.

    Raises:
        InputError: it is missing, not a regular file, larger, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        kinds = {errno.ELOOP: "a link", errno.ENXIO: "not a regular file", errno.ENOENT: "no such file"}
        raise InputError(f"{path}: {kinds.get(error.errno or 0, error.strerror)}") from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: not a regular file")
    raise InputError(f"{path}: {status.st_size} bytes; allowed: at most {most_bytes}")


def packaged(kind: str) -> Path:
    """The folder ``configs/<kind>`` that ships with paceenv."""
    return Path(str(importlib.resources.files("paceenv.configs"))) / kind


def names(kind: str) -> list[str]:
    """Names of the packaged configs of a kind ("clusters", "suites", "train", ...)."""
    return sorted(p.stem for p in packaged(kind).glob("*.yaml"))


def find(kind: str, name: str | os.PathLike[str]) -> Path:
    """The file of a config: a path, or a name in ``configs/<kind>``. Raises InputError if it is missing."""
    path = Path(name)
    if os.sep not in str(name) and packaged(kind).joinpath(f"{name}.yaml").is_file():
        return packaged(kind) / f"{name}.yaml"
    if path.suffix in YAML_SUFFIXES or (os.sep in str(name) and path.is_file()):
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        return path
    known = names(kind)
    listed = f"{name}: neither a file nor one of configs/{kind}: {', '.join(known)}"
    raise InputError(f"{listed}{did_you_mean(str(name), known)}")


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A YAML mapping from a file; data only. Raises InputError for anything else."""
    import yaml  # only here: importing the live agent must not load it

    try:
        data = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        raise InputError(f"{path}: the file is empty")
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return data


def parse_yaml(text: str) -> Any:
    """The data in a YAML text (``safe_load``).

    Raises:
        yaml.YAMLError: it is not valid.
        ValueError: a value is not, or its aliases repeat more than :data:`MAX_REPEATED` parts: a few hundred bytes may
            stand for billions, which every later step would have to walk.
        RecursionError: it is nested too deeply.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Counts parts while it reads; a long text counts as several, an alias as all parts that it stands for."""

        parts = repeated = 0

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.parts_of: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias, before = self.check_event(yaml.AliasEvent), self.parts
            node = super().compose_node(parent, index)
            if not is_alias:
                self.parts += 1 + (len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 0)
                self.parts_of[id(node)] = self.parts - before
            elif id(node) not in self.parts_of:
                raise ValueError("an alias refers to what it is in")
            else:
                self.parts += self.parts_of[id(node)]
                self.repeated += self.parts_of[id(node)]
            if self.repeated > MAX_REPEATED:
                raise ValueError(f"its aliases stand for more than {MAX_REPEATED} parts")
            return node

    loader = Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
