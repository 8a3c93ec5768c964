"""The bytes of a file that may be gzipped: in pieces or lines, its head to find its format, and all of it."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceenv.core.errors import InputError

_GZIP: Final = b"\x1f\x8b"
_BROKEN: Final = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a gzip that is cut or damaged raises, once all before the damage has been given."""
_HEAD_BYTES: Final = 1 << 16
_ENDS: Final = re.compile(rb"[\r\n]+")


class Unpacked:
    """A file's content, to be iterated over once, in pieces.

    Afterwards ``damage`` is where its gzip broke off, or "". Raises InputError if the file cannot be read.
    """

    def __init__(self, path: Path, piece_bytes: int = 1 << 20) -> None:
        self.path, self.damage, self._piece_bytes = path, "", piece_bytes

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                packed = file.read(2) == _GZIP
                file.seek(0)
                stream = gzip.GzipFile(fileobj=file) if packed else file
                try:
                    while piece := stream.read1(self._piece_bytes):  # what there is before it complains of what follows
                        yield piece
                except _BROKEN as error:
                    self.damage = " ".join(str(error).split())
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from None

    def lines(self, most_bytes: int) -> Iterator[bytes]:
        """Lines without their ends; of endless ones at least the first ``most_bytes``."""
        rest = b""
        for piece in self:
            *whole, rest = _ENDS.split(rest + piece)
            rest = rest[:most_bytes]
            yield from whole
        if rest:
            yield rest


def head_of(path: Path) -> bytes:
    """A file's first bytes, unpacked. Raises InputError if it cannot be read, or is text in UTF-16."""
    unpacked, head = Unpacked(path, _HEAD_BYTES), b""
    for piece in unpacked:
        head += piece
        if len(head) >= _HEAD_BYTES:
            break
    if unpacked.damage and not head:
        raise InputError(f"{path}: damaged gzip file: {unpacked.damage}")
    if head[:2] in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        raise InputError(f"{path}: text in UTF-16; allowed: UTF-8, as of iconv -f UTF-16 -t UTF-8")
    return head[:_HEAD_BYTES]


def content_of(path: Path, most_bytes: int) -> tuple[bytes, str]:
    """All of a file, unpacked, and "" or where its gzip broke off. Raises InputError if it is larger or unreadable."""
    content, unpacked = bytearray(), Unpacked(path)
    for piece in unpacked:
        content += piece
        if len(content) > most_bytes:
            raise InputError(f"{path}: more than {most_bytes >> 20} MB; allowed: at most that")
    return bytes(content), unpacked.damage
