"""What training programs write into a line about a step: one small table of patterns per program.

Every field is searched for by itself, behind a literal text and with bounded repeats. So a line takes time that grows
with its length only, whatever it holds. A field's name is its unit, as in the user's own ``--pattern``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

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
    LineFormat(
        "DeepSpeed",
        ("iter time (s):",),
        _fields(step=rf"steps?: {{0,8}}{_INT}", s=rf"iter time \(s\): ?{_N}"),
    ),
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
