"""Streams the events of a JSON trace, gzipped or not, one by one in bounded memory; of a damaged file what there is.

For the object form with a "traceEvents" list (PyTorch profiler, Chrome, Perfetto's legacy format), the bare list, and
any other list named in its place. Nothing in a file can make it take more than MOST_EVENT characters at once.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from paceenv.errors import InputError
from paceenv.importers.packed import GZIP

MOST_EVENT: Final = 1 << 22
"""Characters of one event, or of what comes before the first."""
_CHUNK: Final = 1 << 18
_SPACE: Final = re.compile(r"[\s,]*")


class EventFile:
    """An open JSON trace: iterate over its events, once. Then ``damage`` says in one line where it broke off, or is "".

    ``header`` are the characters before the list, for :meth:`value`. Raises InputError if there is no such list.
    """

    def __init__(self, path: str | Path, name: str = "traceEvents") -> None:
        self.path, self.damage, self.events, self._ended = Path(path), "", 0, False
        self._buffer, self._decoder = "", json.JSONDecoder()
        try:
            self._file = self.path.open("rb")
            head = self._file.read(2)
            self._file.seek(0)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        self._stream: gzip.GzipFile | BufferedReader = gzip.GzipFile(fileobj=self._file) if head == GZIP else self._file
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = self._find_list(name)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _find_list(self, name: str) -> int:
        start = re.compile(rf'"{name}"\s*:\s*\[|\A[\s﻿]*\[')
        while True:
            found = start.search(self._buffer)
            if found is not None:
                self.header = self._buffer[: found.start()]
                return found.end()
            if len(self._buffer) > MOST_EVENT or not self._more():
                self._file.close()
                what = self.damage or f'no list "{name}" in its first {MOST_EVENT >> 20} MB'
                raise InputError(f"{self.path}: not a JSON trace: {what}")

    def value(self, name: str) -> Any:
        """What the header says of a name, None where it says nothing."""
        for found in re.finditer(rf'"{name}"\s*:\s*', self.header):
            try:
                return self._decoder.raw_decode(self.header, found.end())[0]
            except (ValueError, RecursionError):
                continue
        return None

    def _more(self) -> bool:
        """Read on; whether there was anything."""
        if self._ended:
            return False
        try:
            chunk = self._stream.read1(_CHUNK)  # gives what there is before it complains of what follows
        except (OSError, EOFError, zlib.error) as error:
            self.damage, chunk = " ".join(str(error).split()), b""
        self._ended = not chunk
        self._buffer += self._text.decode(chunk, final=self._ended)
        return not self._ended

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at >= len(self._buffer):
                self._buffer, self._at = "", 0
                if self._more():
                    continue
                return self._break_off("the list has no end")
            if self._buffer[self._at] == "]":
                return None
            try:
                event, end = self._decoder.raw_decode(self._buffer, self._at)
            except RecursionError:
                return self._break_off("nested too deeply")
            except ValueError as error:
                self._buffer, self._at = self._buffer[self._at :], 0
                if len(self._buffer) <= MOST_EVENT and self._more():
                    continue
                return self._break_off(str(error))
            if end == len(self._buffer) and self._more():
                continue  # a number could go on
            self._at = end
            self.events += 1
            if isinstance(event, dict):
                yield event

    def _break_off(self, why: str) -> None:
        self.damage = f"damaged after event {self.events} ({self.damage or why}); what came before is used"
