"""The events of a profile as columns: what ran where, when, under which name, and who launched it.

Only complete events (``"ph": "X"``) are kept, 28 bytes each. Everything that depends on a name is worked out once per
name, so the loop over the events is short.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError
from paceenv.importers.collective_names import is_number
from paceenv.importers.json_events import EventFile

MAX_EVENTS: Final = 1 << 25
"""Complete events of one profile: some 5 GB in memory."""
COLLECTIVE: Final = "Collective name"
_NUMBER: Final = (int, float)
_SAID: Final[dict[str, tuple[type, ...]]] = {
    COLLECTIVE: (str,),
    "In msg nelems": _NUMBER,
    "Out msg nelems": _NUMBER,
    "dtype": (str,),
    "Process Group Name": (str, int),
    "Process Group Ranks": (str, list),
    "Src Rank": (int,),
    "Dst Rank": (int,),
}
"""What PyTorch writes about a collective, at its kernel and at ``record_param_comms`` on its host, and of which types
it is; what has another is as if it were not there."""

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


_KEPT: Final = (((str,), ""), ((str,), ""), ((int, str), None), ((int, str), None))
"""Types of category, name, process and thread, and what stands for any other."""


class _Codes(dict[Any, int]):
    """Numbers for keys, in the order of their appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code


@dataclass(frozen=True)
class EventTable:
    """The complete events of a profile, E of them in the order of the file, and what their codes stand for.

    Times are us on the profile's clock; ``correlation_E`` is -1 without one. ``arguments`` has what is said of the
    collectives among them, by their place.
    """

    start_us_E: Array
    dur_us_E: Array
    category_E: Integers
    name_E: Integers
    process_E: Integers
    thread_E: Integers
    correlation_E: Integers
    categories: tuple[str, ...]
    names: tuple[str, ...]
    processes: tuple[str, ...]
    threads: tuple[str, ...]
    arguments: dict[int, dict[str, Any]]

    def __len__(self) -> int:
        return len(self.start_us_E)

    @property
    def end_us_E(self) -> Array:
        return self.start_us_E + self.dur_us_E

    def in_categories(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        return np.array([wanted(text) for text in self.categories], np.bool_)[self.category_E]

    def named(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        return np.array([wanted(text) for text in self.names], np.bool_)[self.name_E]


def read_events(file: EventFile) -> EventTable:
    """The complete events of a profile. Raises InputError beyond MAX_EVENTS."""
    kinds, kind = _Codes(), array("i")
    times, correlations = array("d"), array("q")
    arguments: dict[int, dict[str, Any]] = {}
    for event in file:
        if event.get("ph") != "X":
            continue
        at_us, dur_us = event.get("ts"), event.get("dur")
        if not (is_number(at_us) and is_number(dur_us) and dur_us >= 0.0):
            continue
        said, correlation = event.get("args"), None
        if type(said) is dict:
            correlation = said.get("correlation")
            if COLLECTIVE in said:
                arguments[len(kind)] = {key: said[key] for key, types in _SAID.items() if type(said.get(key)) in types}
        key = event.get("cat"), event.get("name"), event.get("pid"), event.get("tid")
        try:
            kind.append(kinds[key])
        except TypeError:  # one of them is a list or an object
            kind.append(kinds[tuple(value if type(value) in (int, str) else None for value in key)])
        times.extend((at_us, dur_us))
        correlations.append(correlation if type(correlation) is int and abs(correlation) < 1 << 63 else -1)
        if len(kind) > MAX_EVENTS:
            raise InputError(f"{file.path}: more than {MAX_EVENTS} complete events; allowed: a profile of fewer steps")
    start_us, dur_us_E = np.array(times, np.float64).reshape(-1, 2).T.copy()
    texts: list[tuple[str, ...]] = []
    columns: list[Integers] = []
    for kept, values in zip(_KEPT, zip(*kinds, strict=True) if kinds else [()] * 4, strict=True):
        codes = _Codes()
        plain = [str(value if type(value) in kept[0] else kept[1]) for value in values]
        plain = [text.encode("utf-8", "replace").decode() for text in plain]  # JSON may have half a character
        code_of_kind = np.array([codes[text] for text in plain], np.int64)
        texts.append(tuple(codes))
        columns.append(code_of_kind[np.array(kind, np.int64)])
    return EventTable(start_us, dur_us_E, *columns, np.array(correlations, np.int64), *texts, arguments)  # type: ignore[call-arg, arg-type]
