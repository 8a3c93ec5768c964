"""Streams the events of a JSON trace, gzipped or not, in bounded memory; a damaged file is read up to the damage.

For the object form with a "traceEvents" list (PyTorch profiler, Chrome, Perfetto's legacy format), the bare list, and
any other named list. No file can make it hold more than MAX_EVENT bytes at once.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from paceenv.core.errors import InputError
from paceenv.importers.packed import open_unpacked

MAX_EVENT: Final = 1 << 22
"""Bytes of one event, or of what comes before the first."""
_CHUNK: Final = 1 << 17
"""Bytes decoded at once: what is made of them stays in a processor's cache."""
_SPACE: Final = re.compile(r"[ \t\n\r,]*")
_BLANK: Final = b" \t\n\r"
_MAX_LOOKS: Final = 1000
"""Braces looked at, from a chunk's end, for one between two events."""


class EventFile:
    """An open JSON trace: iterate over its events once, or take them in batches, decoded to a type where they fit.

    Afterwards ``damage`` says in one line where the file broke off, or is "". ``header`` is the text before the list,
    for :meth:`value`. Raises InputError if there is no such list.
    """

    def __init__(self, path: str | Path, name: str = "traceEvents") -> None:
        self.path, self.damage, self.events, self._ended = Path(path), "", 0, False
        self._buffer, self._at, self._decoder = b"", 0, json.JSONDecoder()
        try:
            self._file, self._stream = open_unpacked(self.path)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        self._at = self._find_list(name)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _find_list(self, name: str) -> int:
        start = re.compile(rb'"%s"\s*:\s*\[|\A(?:\xef\xbb\xbf)?\s*\[' % name.encode())
        while True:
            match = start.search(self._buffer)
            if match is not None:
                self.header = self._buffer[: match.start()].decode("utf-8", "replace")
                return match.end()
            if len(self._buffer) > MAX_EVENT or not self._more():
                self._file.close()
                what = self.damage or f'no list "{name}" in its first {MAX_EVENT >> 20} MB'
                raise InputError(f"{self.path}: not a JSON trace: {what}")

    def value(self, name: str) -> Any:
        """The value of a name in the header, None without one."""
        for match in re.finditer(rf'"{name}"\s*:\s*', self.header):
            try:
                return self._decoder.raw_decode(self.header, match.end())[0]
            except (ValueError, RecursionError):
                continue
        return None

    def _more(self) -> bool:
        """Let go of what has been taken, and read on; whether there was anything."""
        chunks, size = [self._buffer[self._at :]], 0
        while size < _CHUNK and not self._ended:
            try:
                chunk = self._stream.read1(_CHUNK)  # gives what there is before it complains of what follows
            except (OSError, EOFError, zlib.error) as error:
                self.damage, chunk = " ".join(str(error).split()), b""
            self._ended = not chunk
            size += len(chunk)
            chunks.append(chunk)
        self._buffer, self._at = b"".join(chunks), 0
        return size > 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (events := self._one_by_one()) is not None:
            yield from events

    def batches(self, decode: Callable[[bytes], list[Any]]) -> Iterator[list[Any]]:
        """The events in batches, as ``decode`` makes them of a JSON list; where it raises, as Python reads them."""
        while True:
            yield self._at_once(decode)
            if len(self._buffer) - self._at >= _CHUNK or not self._more():
                events = self._one_by_one()
                if events is None:
                    return
                yield events

    def _at_once(self, decode: Callable[[bytes], list[Any]]) -> list[Any]:
        """All events up to the last place in the buffer that looks like one between two; none if something is odd.

        What decodes as a list is one, so a place that only looks like that cannot be taken for it.
        """
        end, comma = self._between()
        if comma <= self._at:
            return []
        with memoryview(self._buffer) as buffer:
            text = b"".join((b"[", buffer[self._at : comma], b"]"))
        try:
            events = decode(text[:1] + text[1:].lstrip(b", \t\n\r") if text[1:2] in b", \t\n\r" else text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
        self._at, self.events = end, self.events + len(events)
        return events

    def _between(self) -> tuple[int, int]:
        """The last object in the buffer that follows another one, and the comma between; else the buffer's begin."""
        brace = len(self._buffer)
        for _ in range(_MAX_LOOKS):
            brace = self._buffer.rfind(b"{", self._at, brace)
            if brace < 0:
                break
            before = self._buffer[max(brace - 64, self._at) : brace].rstrip(_BLANK)
            if before[-1:] == b"," and before[:-1].rstrip(_BLANK)[-1:] == b"}":
                return brace, max(brace - 64, self._at) + len(before) - 1
        return self._at, self._at

    def _one_by_one(self) -> list[dict[str, Any]] | None:
        """Events that are whole in the buffer, read on where none is; None where the list ends or breaks off."""
        while True:
            whole_events, why = self._whole()
            if whole_events:
                self.events += len(whole_events)
                return [event for event in whole_events if isinstance(event, dict)]
            if not why:
                return None
            if len(self._buffer) - self._at > MAX_EVENT or not self._more():
                self.damage = f"damaged after event {self.events} ({self.damage or why}); what came before is used"
                return None

    def _whole(self) -> tuple[list[Any], str]:
        """What can be decoded in the buffer, and why no more; "" at the list's end."""
        text = self._buffer[self._at :].decode("latin-1")  # a character a byte; what is not ASCII is in strings
        values: list[Any] = []
        at, begin = 0, self._at
        while True:
            space = _SPACE.match(text, at)
            at = space.end() if space else at
            self._at = begin + at
            if at >= len(text):
                return values, "the list has no end"
            if text[at] == "]":
                return values, ""
            try:
                value, end = self._decoder.raw_decode(text, at)
                if not text[at:end].isascii():
                    value = json.loads(text[at:end].encode("latin-1").decode("utf-8", "replace"))
            except RecursionError:
                return values, "nested too deeply"
            except ValueError as error:
                return values, getattr(error, "msg", str(error))  # without a place, which would be one in the buffer
            if end == len(text) and text[end - 1] not in '}]"' and not self._ended:
                return values, "the list has no end"  # a number could go on
            values.append(value)
            at = end
