"""Files written completely or not at all, with the permissions of their user; files read that are none."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write, open_atomic, open_regular
from paceenv.core.trace import TraceMetadata, TraceWriter

MOST = 1000


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o000])
def test_the_umask_is_respected(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        atomic_write(tmp_path / "new" / "file", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "file").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o777 & ~umask


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def fail() -> None:
        with open_atomic(path) as file:
            file.write(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="cannot be written: No space left"):
        fail()
    with pytest.raises(InputError, match="cannot be written"):
        atomic_write(path / "below a file", b"new")
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"old")]


def test_only_regular_files_of_a_bounded_size_are_opened(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x" * MOST)
    with open_regular(tmp_path / "good", MOST) as file:
        assert len(file.read()) == MOST
    os.mkfifo(tmp_path / "fifo")  # to open it would wait for a writer
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, why in {
            "fifo": "not a regular file",
            "link": "a link",
            "huge": f"{1 << 40} bytes; allowed: at most {MOST}",
            "socket": "not a regular file",
            ".": "not a regular file",
            "none": "no such file",
        }.items():
            number = len(os.listdir("/proc/self/fd"))
            with pytest.raises(InputError, match=why):
                open_regular(tmp_path / name, MOST)
            assert len(os.listdir("/proc/self/fd")) == number


@pytest.mark.parametrize("name", [".", "/", "folder"])
def test_a_folder_is_refused_as_a_file_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder; allowed: the name of a file"):
        atomic_write(name, b"content")
    with pytest.raises(InputError, match="is a folder"):
        TraceWriter(name, TraceMetadata({}, (), "test"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
