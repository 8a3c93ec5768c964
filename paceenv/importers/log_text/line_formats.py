"""What training programs write into a line about a step: one small table of patterns per program.

Every field is searched for by itself, behind a literal text and with bounded repeats. So a line takes time that grows
with its length only, whatever it holds. A field's name is its unit, as in the user's own ``--pattern``.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Literal

from paceenv.core.errors import InputError, short_repr

_N: Final = r"([0-9]{1,15}(?:,[0-9]{1,9}){0,3}(?:\.[0-9]{0,9})?(?:[eE][+-]?[0-9]{1,2})?)"
_INT: Final = r"([0-9]{1,12})"
_COMMAS: Final = r"([0-9][0-9,]{0,20}(?:\.[0-9]{1,6})?)"

Averages = Literal["interval", "one step"]


@dataclass(frozen=True)
class LineFormat:
    """A line of one program.

    Fields are ``step``; one of ``s``, ``ms`` (a step time), ``rate`` (steps, samples or tokens per second, in an
    unknown unit), ``elapsed_s``, ``elapsed_ms``, ``elapsed`` (h:mm:ss; time since the start, which is differenced),
    ``mean_steps_per_s`` (since the start, which is differenced too); and ``total``, the number of steps of a bar.
    ``averages`` tells whether a value is the mean over all steps since the last line or the time of one step.
    """

    name: str
    needles: tuple[str, ...]
    fields: Mapping[str, re.Pattern[str]]
    averages: Averages = "interval"
    unless: tuple[str, ...] = ()
    without_step: bool = field(default=False)

    def match(self, text: str) -> dict[str, str] | None:
        """The fields in a line, or None where it is not of this format."""
        if not all(needle in text for needle in self.needles) or any(word in text for word in self.unless):
            return None
        found = {}
        for name, pattern in self.fields.items():
            hit = pattern.search(text)
            if hit is not None:
                found[name] = next(group for group in hit.groups() if group is not None)
        return found if len(found) > ("step" in found) + ("total" in found) else None


def _fields(**patterns: str) -> dict[str, re.Pattern[str]]:
    return {name: re.compile(pattern) for name, pattern in patterns.items()}


_NO_TRAINING: Final = (
    "Validat", "validat", "Evaluat", "Sanity", "Testing", "Predict", "Download", "Loading", "Fetching", "Resolving",
    "Map:", "Map (", "Filter", "Generating", "Tokeniz", "tokeniz", "dataset", "examples/s", "ba/s",
    "Processed prompts",
)  # fmt: skip
"""In progress bars of anything else: evaluation, files, Hugging Face's datasets (which count examples), vLLM."""
BAR: Final = "progress bar (tqdm)"

FORMATS: Final = (
    LineFormat(
        "Megatron-LM",
        ("lapsed time per iteration (ms):",),
        _fields(step=rf"teration:? {{0,12}}{_INT}", ms=rf"lapsed time per iteration \(ms\): {{0,4}}{_N}"),
    ),
    LineFormat(
        "NeMo",
        ("train_step_timing in s",),
        _fields(step=rf"global_step['\"]?[:=] ?{_INT}|teration {_INT}/", s=rf"train_step_timing in s['\"]?[:=] ?{_N}"),
        "one step",
    ),
    LineFormat("DeepSpeed", ("iter time (s):",), _fields(step=rf"steps?: {{0,8}}{_INT}", s=rf"iter time \(s\): ?{_N}")),
    LineFormat(
        "MaxText",
        ("completed step:", "seconds:"),
        _fields(step=rf"completed step: ?{_INT}", s=rf"seconds: ?{_N}"),
        "one step",
    ),
    LineFormat(
        "nanoGPT",
        ("iter ", "time "),
        _fields(step=rf"iter {{1,4}}{_INT}", ms=rf"time {{1,12}}{_N} ?ms", s=rf"time {{1,12}}{_N} ?s(?![a-z])"),
        "one step",
    ),
    LineFormat(
        "build-nanogpt",
        ("step", "dt:"),
        _fields(step=rf"step:? {{0,8}}{_INT}", ms=rf"dt: {{0,8}}{_N} ?ms", s=rf"dt: {{0,8}}{_N} ?s(?![a-z])"),
        "one step",
    ),
    LineFormat(
        "llm.c",
        ("step ", " ms |", "tok/s"),
        _fields(step=rf"step {{1,8}}{_INT}/", ms=rf"\| {{0,8}}{_N} ms \|"),
        "one step",
    ),
    LineFormat(
        "modded-nanogpt",
        ("step:", "train_time:"),
        _fields(step=rf"step:{_INT}/", elapsed_ms=rf"train_time:{_N}ms", elapsed_s=rf"train_time:{_N}s"),
    ),
    LineFormat(
        "torchtitan",
        ("step:", "loss:", "ps:"),
        _fields(step=rf"step: {{0,8}}{_INT}", rate=rf"[tw]ps: {{0,8}}{_COMMAS}"),
        unless=("validate step",),
    ),
    LineFormat(
        "DeepSpeed (samples/s)",
        ("CurrSamplesPerSec=",),
        _fields(step=rf"global_step={_INT}", rate=rf"CurrSamplesPerSec={_N}"),
        "one step",
    ),
    LineFormat(
        "Hugging Face Trainer (step_time)",
        ("step_time'",),
        _fields(step=rf"'(?:global_)?step': ?'?{_INT}|'global_step/max_steps': ?'{_INT}", s=rf"'step_time': ?'?{_N}"),
        without_step=True,
    ),
    LineFormat(
        "ms-swift",
        ("train_speed(iter/s)", "global_step"),
        _fields(
            step=rf"global_step['\"]?: ?['\"]?{_INT}|global_step/max_steps['\"]: ?['\"]{_INT}",
            mean_steps_per_s=rf"train_speed\(iter/s\)['\"]: ?['\"]?{_N}",
        ),
    ),
    LineFormat(
        BAR,
        ("/", "[", "<"),
        _fields(
            step=rf"(?<![0-9.]){_INT}/[0-9]{{1,12}} \[",
            total=rf"(?<![0-9.])[0-9]{{1,12}}/{_INT} \[",
            elapsed=r"/[0-9]{1,12} \[((?:[0-9]{1,3}:)?[0-9]{1,2}:[0-9]{2})<",
        ),
        unless=_NO_TRAINING,
    ),
)
"""In the order of trust: of several in a log, the first with enough values is taken."""

SAMPLES_PER_STEP: Final = re.compile(rf"train_batch_size \.{{1,64}} {_INT}")
"""DeepSpeed prints its configuration; its samples per second are of the whole batch."""
ANY_STEP: Final = re.compile(
    rf"(?<![A-Za-z])(?:global_?step|[Ss]tep|[Ii]ter(?:ation)?)[ ]?(?:#|:|=|\[| )[ ]{{0,8}}{_INT}(?![0-9.]*[a-z%])"
)
"""A step number in a line of any program; with a time stamp before it, that is enough."""


VALUES: Final = ("s", "ms", "us", "steps_per_s", "rate", "elapsed_s", "elapsed_ms", "elapsed", "mean_s", "mean_ms")
"""Groups that give a step time; without one, the time stamps of the lines do."""
GROUPS: Final = ("step", *VALUES, "time", "rank")
MAX_LINE: Final = 2000
"""Characters of a line that a user's pattern sees."""
MAX_PATTERN: Final = 2000
LIMIT_S: Final = 1.0
"""Time for one line. A pattern with nested repeats may need longer than anybody waits."""
_ALLOWED = (
    "(?P<s>..), (?P<ms>..) or (?P<us>..) for a step time; (?P<steps_per_s>..) or (?P<rate>..) for a speed; "
    "(?P<elapsed_s>..), (?P<elapsed_ms>..) or (?P<elapsed>h:mm:ss) for the time since the start; (?P<mean_s>..) or "
    "(?P<mean_ms>..) for a mean since the start; or (?P<step>..) alone in lines that begin with a time stamp. "
    "(?P<step>..), (?P<time>..) and (?P<rank>..) may stand beside each"
)


class UserPattern:
    """A compiled ``--pattern``.

    Raises InputError: it is no regular expression, or lacks a group that it needs.
    """

    name = "--pattern"

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN:
            raise InputError(f"--pattern: {len(text)} characters; allowed: at most {MAX_PATTERN}")
        try:
            self._pattern = re.compile(text)
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            raise InputError(
                f"--pattern {short_repr(text)}: no regular expression ({error}); "
                "allowed: for example 'step (?P<step>\\d+).*time: (?P<ms>[\\d.]+)'"
            ) from None
        names = set(self._pattern.groupindex)
        if names - set(GROUPS):
            raise InputError(f"--pattern: group {sorted(names - set(GROUPS))[0]!r} is unknown; allowed: {_ALLOWED}")
        values = names & set(VALUES)
        if len(values) > 1:
            raise InputError(f"--pattern: groups {', '.join(sorted(values))}; allowed: one of them, {_ALLOWED}")
        if not values and "step" not in names:
            raise InputError(f"--pattern {short_repr(text)}: no named group with a time; allowed: {_ALLOWED}")
        if values & {"elapsed_s", "elapsed_ms", "elapsed", "mean_s", "mean_ms"} and "step" not in names:
            raise InputError(f"--pattern: {values.pop()} without (?P<step>..); allowed: both, as it is differenced")

    def match(self, text: str) -> dict[str, str] | None:
        """The groups found in a line, or None. Raises InputError if the line takes longer than :data:`LIMIT_S`."""
        with _limit(self._pattern.pattern):
            found = self._pattern.search(text[:MAX_LINE])
        if found is None:
            return None
        return {name: value for name, value in found.groupdict().items() if value is not None}


@contextmanager
def _limit(pattern: str) -> Iterator[None]:
    """Interrupt a search after :data:`LIMIT_S`; Python looks for signals while it searches."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only, where the command line runs
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise InputError(
            f"--pattern {short_repr(pattern)}: took more than {LIMIT_S:g} s for one line; allowed: a pattern without "
            "repeats of repeats, such as (a+)+"
        )

    before = signal.signal(signal.SIGALRM, stop)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        signal.signal(signal.SIGALRM, before)
