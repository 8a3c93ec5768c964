"""The bytes of a file that may be gzipped: as a stream, its head to find its format, and all of it up to a limit."""

from __future__ import annotations

import codecs
import gzip
import zlib
from io import BufferedReader
from pathlib import Path
from typing import Final

from paceenv.core.errors import InputError

_GZIP: Final = b"\x1f\x8b"
BROKEN: Final = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a gzip that is cut or damaged raises, once all before the damage has been given."""
_HEAD_BYTES: Final = 1 << 16
_CHUNK: Final = 1 << 20


def open_unpacked(path: Path) -> tuple[BufferedReader, gzip.GzipFile | BufferedReader]:
    """A file to be closed, and its content as a stream. Raises OSError if it cannot be opened."""
    file = path.open("rb")
    packed = file.read(2) == _GZIP
    file.seek(0)
    return file, gzip.GzipFile(fileobj=file) if packed else file


def head_of(path: Path) -> bytes:
    """A file's first bytes, unpacked. Raises InputError if it cannot be read, or is text in UTF-16."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if head[:2] == _GZIP:
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, _HEAD_BYTES)
        except zlib.error as error:
            raise InputError(f"{path}: damaged gzip file: {error}") from None
    if head[:2] in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        raise InputError(f"{path}: text in UTF-16; allowed: UTF-8, as of iconv -f UTF-16 -t UTF-8")
    return head


def content_of(path: Path, most_bytes: int) -> tuple[bytes, str]:
    """All of a file, unpacked, and "" or where its gzip broke off. Raises InputError if it is larger or unreadable."""
    content, damage = bytearray(), ""
    try:
        file, stream = open_unpacked(path)
        with file:
            try:
                while len(content) <= most_bytes and (chunk := stream.read1(_CHUNK)):
                    content += chunk
            except BROKEN as error:
                damage = " ".join(str(error).split())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if len(content) > most_bytes:
        raise InputError(f"{path}: more than {most_bytes >> 20} MB; allowed: at most that")
    return bytes(content), damage
