"""The events of a profile as columns: what ran where, when, under which name, and who launched it.

Only complete events (``"ph": "X"``) are kept, 28 bytes each. Everything that depends on a name is worked out once per
name, so the loop over the events is short.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceenv.core.errors import InputError

MAX_US: Final = 1e19
"""Times beyond this are damaged."""
MAX_EVENTS: Final = 1 << 25
"""Complete events of one profile: some 5 GB in memory."""
COLLECTIVE_KEY: Final = b'"Collective name"'
"""Only where this stands are the arguments of collectives decoded."""
_OTHER_PHASES: Final = "BEIMRCNODPSTVFabcefinstvp()"

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Found = TypeVar("Found", bound=msgspec.Struct)


class Launch(msgspec.Struct, gc=False, frozen=True):
    """The one argument that every event needs: it joins what the device ran to the call that launched it."""

    correlation: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = -1


class CollectiveArguments(Launch, gc=False, frozen=True):
    """What PyTorch writes about a collective, at its kernel and at ``record_param_comms`` on its host."""

    name: str = msgspec.field(default="", name="Collective name")
    elements: int | float = msgspec.field(default=-1, name="In msg nelems")
    outputs: int | float = msgspec.field(default=-1, name="Out msg nelems")
    dtype: str = msgspec.field(default="", name="dtype")
    number: int = msgspec.field(default=-1, name="Seq")
    group_name: str | int = msgspec.field(default="", name="Process Group Name")
    group_ranks: str | list[int] = msgspec.field(default="", name="Process Group Ranks")
    sender: int = msgspec.field(default=-1, name="Src Rank")
    receiver: int = msgspec.field(default=-1, name="Dst Rank")


_NO_LAUNCH: Final = Launch()
_NO_ARGUMENTS: Final = CollectiveArguments()


class Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """An event with a beginning and a duration, us."""

    cat: str = ""
    name: str = ""
    ts: float = math.nan
    dur: float = math.nan
    pid: int | str | None = None
    tid: int | str | None = None
    args: Launch = _NO_LAUNCH


class CompleteCollective(Complete, gc=False, tag_field="ph", tag="X"):
    """As :class:`Complete`, with what is said of collectives."""

    args: CollectiveArguments = _NO_ARGUMENTS


def _of(event: dict[str, Any]) -> Complete | None:
    """An event that may have anything anywhere, if it is complete."""
    if event.get("ph") != "X":
        return None
    complete, said = _fitting(Complete, event), event.get("args")
    complete.args = _fitting(CollectiveArguments, said) if isinstance(said, dict) else _NO_LAUNCH
    return complete


def _fitting(kind: type[Found], said: dict[str, Any]) -> Found:
    """What has its type, each by itself; all else is left at its default."""
    fields: dict[str, Any] = {}
    for name, key in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        if key in said and key != "args":
            with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeError):
                fields[name] = getattr(msgspec.convert({"ph": "X", key: said[key]}, kind), name)
    return kind(**fields)


def _decoder(kind: type[Complete]) -> msgspec.json.Decoder[list[Any]]:
    """For a list of events; those of other phases are skipped, as objects without fields."""
    others = [
        msgspec.defstruct(f"Other{i}", [], gc=False, tag_field="ph", tag=phase)
        for i, phase in enumerate(sorted(set(_OTHER_PHASES)))
    ]
    return msgspec.json.Decoder(list[reduce(or_, others, kind)])  # type: ignore[misc]


_FAST: Final = _decoder(Complete)
_FULL: Final = _decoder(CompleteCollective)


def decode(text: bytes) -> list[Any]:
    """The events of a JSON list. Raises what msgspec raises where one has not the usual types."""
    return (_FULL if COLLECTIVE_KEY in text else _FAST).decode(text)


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
    arguments: dict[int, CollectiveArguments]

    def __len__(self) -> int:
        return len(self.start_us_E)

    @property
    def end_us_E(self) -> Array:
        return self.start_us_E + self.dur_us_E

    def in_categories(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events are of a wanted category."""
        return np.array([wanted(text) for text in self.categories], np.bool_)[self.category_E]

    def named(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events have a wanted name."""
        return np.array([wanted(text) for text in self.names], np.bool_)[self.name_E]


class EventColumns:
    """Collects events; see :class:`EventTable`."""

    def __init__(self) -> None:
        self._kinds = _Codes()
        self._blocks: list[tuple[NDArray[Any], ...]] = []
        self._arguments: dict[int, CollectiveArguments] = {}
        self._count = 0

    def take(self, events: list[Any]) -> None:
        """Add a batch, as :func:`decode` or the standard library made it. Raises InputError beyond MAX_EVENTS."""
        kept = [event for event in events if type(event) is Complete]
        # A batch has events of one decoder only, so without plain ones it is a batch that says more, or a strange one.
        says_more = not kept
        if says_more:
            odd = (_of(event) if type(event) is dict else event for event in events)
            kept = [event for event in odd if isinstance(event, Complete)]
        if not kept:
            return
        kinds, count = self._kinds, len(kept)
        start_us = np.fromiter([event.ts for event in kept], np.float64, count)
        dur_us = np.fromiter([event.dur for event in kept], np.float64, count)
        good = (np.abs(start_us) < MAX_US) & (dur_us >= 0.0) & (dur_us < MAX_US)
        block: tuple[NDArray[Any], ...] = (
            start_us,
            dur_us,
            np.fromiter([kinds[event.cat, event.name, event.pid, event.tid] for event in kept], np.int32, count),
            np.fromiter([event.args.correlation for event in kept], np.int64, count),
        )
        if not good.all():
            block = tuple(column[good] for column in block)
            kept = [event for event, fine in zip(kept, good.tolist(), strict=True) if fine]
        self._blocks.append(block)
        if says_more:
            for place, event in enumerate(kept, self._count):
                arguments = event.args
                if isinstance(arguments, CollectiveArguments) and arguments != _NO_ARGUMENTS:
                    self._arguments[place] = arguments
        self._count += len(kept)
        if self._count > MAX_EVENTS:
            raise InputError(f"more than {MAX_EVENTS} complete events; allowed: a profile of fewer steps")

    def table(self) -> EventTable:
        """All that was taken; the collector is empty afterwards."""
        start_us, dur_us, kind, correlation = (
            np.concatenate([np.empty(0, dtype), *(block[i] for block in self._blocks)])
            for i, dtype in enumerate((np.float64, np.float64, np.int32, np.int64))
        )
        texts: list[tuple[str, ...]] = []
        columns: list[Integers] = []
        for values in zip(*self._kinds, strict=True) if self._kinds else [()] * 4:
            codes = _Codes()
            code_of_kind = np.array([codes[str(value)] for value in values], np.int64)
            texts.append(tuple(codes))
            columns.append(code_of_kind[kind])
        categories, names, processes, threads = texts
        category, name, process, thread = columns
        self._blocks = []
        return EventTable(
            start_us_E=start_us,
            dur_us_E=dur_us,
            category_E=category,
            name_E=name,
            process_E=process,
            thread_E=thread,
            correlation_E=correlation,
            categories=categories,
            names=names,
            processes=processes,
            threads=threads,
            arguments=self._arguments,
        )
