"""The bytes of a file that may be gzipped: its head, to find its format, and all of it up to a limit."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, Final

from paceenv.core.errors import InputError

GZIP: Final = b"\x1f\x8b"
_HEAD_BYTES: Final = 1 << 16
_CHUNK: Final = 1 << 20
_PACKED_CHUNK: Final = 1 << 16


class Unpacked:
    """A gzipped file's content as it is read, in chunks; of damage it complains only after what comes before."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left, self._members = file, b"", 0
        self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def read1(self, size: int) -> bytes:
        """At most ``size`` bytes, b"" at the end. Raises EOFError or zlib.error where the file is damaged."""
        while True:
            if self._unpack.eof:
                self._left = (self._unpack.unused_data or self._file.read(_PACKED_CHUNK)).lstrip(b"\0")
                if not self._left:
                    return b""
                self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
            packed = self._left or self._file.read(_PACKED_CHUNK)
            found = self._unpack.decompress(packed, size)
            self._left = self._unpack.unconsumed_tail
            if found:
                return found
            if not packed and not self._unpack.eof:
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")


def head_of(path: Path) -> bytes:
    """A file's first bytes, unpacked. Raises InputError if it cannot be read, or is text in UTF-16."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if head[:2] == GZIP:
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, _HEAD_BYTES)
        except zlib.error as error:
            raise InputError(f"{path}: damaged gzip file: {error}") from None
    if head[:2] in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        raise InputError(f"{path}: text in UTF-16; allowed: UTF-8, as of iconv -f UTF-16 -t UTF-8")
    return head


def content_of(path: Path, most_bytes: int) -> tuple[bytes, str]:
    """All of a file, unpacked, and "" or where its gzip broke off. Raises InputError if it is larger or unreadable.

    Args:
        path: of the file, packed by gzip or not.
        most_bytes: largest size when unpacked.
    """
    content, damage = bytearray(), ""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            try:
                while len(content) <= most_bytes and (chunk := stream.read1(_CHUNK)):
                    content += chunk
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                damage = " ".join(str(error).split())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if len(content) > most_bytes:
        raise InputError(f"{path}: more than {most_bytes >> 20} MB; allowed: at most that")
    return bytes(content), damage
