"""Streams the events of a JSON trace, gzipped or not, in bounded memory; a damaged file is read up to the damage.

For the object form with a "traceEvents" list (PyTorch profiler, Chrome, Perfetto's legacy format) and the bare list. No
file can make it hold more than a few times MAX_EVENT bytes at once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from paceenv.core.errors import InputError
from paceenv.importers.packed import Unpacked

MAX_EVENT: Final = 1 << 22
"""Characters of one event, or of what comes before the first."""
_PIECE_BYTES: Final = 1 << 18
_SEPARATORS: Final = " \t\n\r,"
_SPACE: Final = re.compile(rf"[{_SEPARATORS}]*")
_NEXT_EVENT: Final = re.compile(r",[ \t\n\r]*\{")


class EventFile:
    """A JSON trace: iterate over its events once.

    Afterwards ``events`` is how many entries the list has, and ``damage`` says in one line where the file broke off, or
    is "". ``header`` is the text before the list, for :meth:`value`. Raises InputError if there is no such list.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.damage, self.events = Path(path), "", 0
        self._unpacked = Unpacked(self.path, _PIECE_BYTES)
        self._pieces, self._decoder = iter(self._unpacked), json.JSONDecoder()
        self._to_text = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text, self._at, self._is_new = "", 0, False
        start = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')
        while (match := start.search(self._text)) is None:
            if len(self._text) > MAX_EVENT or not self._more():
                what = self._unpacked.damage or f'no list "traceEvents" in its first {MAX_EVENT >> 20} MB'
                raise InputError(f"{self.path}: not a JSON trace: {what}")
        self.header, self._at = self._text[: match.start()], match.end()

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
        piece = next(self._pieces, b"")
        self._text, self._at = self._text[self._at :] + self._to_text.decode(piece, not piece), 0
        self._is_new = bool(piece)
        return self._is_new

    def _at_once(self) -> list[Any]:
        """What can be decoded in one go of text that was just read; nothing where it is not as programs write it.

        A brace between two events may also stand elsewhere. But what decodes as a list is one.
        """
        end = self._text.rfind("},", self._at) + 1 if self._is_new else 0
        while end > 0 and not _NEXT_EVENT.match(self._text, end):
            end = self._text.rfind("},", self._at, end - 1) + 1
        self._is_new = False
        try:
            events = orjson.loads(f"[{self._text[self._at : end].lstrip(_SEPARATORS)}]") if end > 0 else []
        except ValueError:
            return []
        self._at, self.events = max(end, self._at), self.events + len(events)
        return events

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from (event for event in self._at_once() if type(event) is dict)
            try:
                self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
                if self._text[self._at : self._at + 1] == "]":
                    return
                event, end = self._decoder.raw_decode(self._text, self._at)
                is_whole = end < len(self._text) or type(event) is dict  # a number could go on
                why = "" if is_whole else "the list has no end"
            except RecursionError:
                why = "nested too deeply"
            except ValueError as error:
                why = getattr(error, "msg", str(error))  # without a place, which would be one in the buffer
            if not why:
                self._at, self.events = end, self.events + 1
                if type(event) is dict:
                    yield event
            elif len(self._text) - self._at > MAX_EVENT or not self._more():
                why = self._unpacked.damage or ("the list has no end" if self._at == len(self._text) else why)
                self.damage = f"damaged after event {self.events} ({why}); what came before is used"
                return
