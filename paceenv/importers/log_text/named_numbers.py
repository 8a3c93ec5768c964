"""Numbers with names in any line: ``name: value``, ``name=value``, ``name value unit``, and what each name stands for.

A name is the text between two numbers, as far back as a delimiter; what it means is told by its words and its unit.
Names that alone would mislead stand in one small table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from paceenv.importers.log_text.conversion import Kind

Averages = Literal["interval", "one step", "unknown"]
Meaning = Literal["step", "epoch", "rank", "stamp", "value", "phase", "setting"]


class Named(NamedTuple):
    """A number as it stands in a line, or in a row of a table: all text; ``total`` is what follows a slash."""

    name: str
    value: str
    unit: str = ""
    total: str = ""


class Role(NamedTuple):
    """What a number is. Of several values in a line that with the least ``trust`` is taken."""

    meaning: Meaning
    name: str  # in plain words
    kind: Kind = "step time"
    unit: float | None = 1.0  # seconds; None where nothing says it
    trust: int = 0
    averages: Averages = "unknown"


class Format(NamedTuple):
    """What a program means by a name where ``needle`` stands in the same line, too."""

    name: str
    needle: str
    program: str
    kind: Kind
    averages: Averages


FORMATS: Final = (
    Format("elapsed time per iteration", "", "Megatron-LM", "step time", "interval"),
    Format("iter time", "samples/sec", "DeepSpeed", "step time", "interval"),
    Format("curr samples per sec", "", "DeepSpeed (samples/s)", "speed", "one step"),
    Format("time", "mfu", "nanoGPT", "step time", "one step"),
    Format("time", "data_time", "detectron2, MMEngine", "step time", "interval"),
    Format("train speed", "global_step", "ms-swift", "mean speed", "interval"),
)
"""Names whose words do not say what the number is, or over how many steps it averages."""
SETTINGS: Final = ("global batch size", "train batch size")
"""Numbers that logs of one job have in common."""
BAR: Final = "progress bar (tqdm)"
TRUST_BAR, TRUST_STAMPS, TRUST_SUM = 90, 99, 100
"""Of progress bars, of time stamps, and of a sum of named parts, after what a line says by itself."""

UNITS_S: Final[Mapping[str, float]] = (
    dict.fromkeys(("s", "sec", "secs", "second", "seconds", "t"), 1.0)
    | dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1e-3)
    | dict.fromkeys(("us", "µs", "μs", "usec", "usecs", "microseconds"), 1e-6)
    | dict.fromkeys(("ns", "nanoseconds"), 1e-9)
    | dict.fromkeys(("min", "mins", "minutes"), 60.0)
    | dict.fromkeys(("h", "hrs", "hours"), 3600.0)
)
_OTHER_UNITS: Final = (
    "%", "k", "m", "g", "b", "kb", "mb", "gb", "tb", "mib", "gib", "kib", "tib", "tflops", "flops", "x", "<",
)  # fmt: skip
_NUMBER: Final = re.compile(
    r"(?=[-\diInN])(?<![\w.+\-])(?P<value>\d{1,6}:\d\d(?::\d\d)?(?![\d:])|"
    r"-?\d{1,20}(?:,\d{1,9}){0,4}(?:\.\d{0,18})?(?:[eE][+-]?\d{1,3})?|-?(?:[nN]a[nN]|[iI]nf)\b)(?![\d.:]*\d)"
    r"(?: ?/ ?(?P<total>\d{1,15})(?![\w.]))?"
    r"(?P<unit> ?(?:[A-Za-zµμ%]{1,12}(?:/[A-Za-z]{1,10}){0,2}|/[A-Za-z]{1,6})|<(?=[\d?]))?"
)
_RATIO: Final = re.compile(r"[a-zµ]*/(?:s|secs?|seconds?|gpu|device)(?:/[a-z]+)?|[a-zµ]{1,5}/[a-z]+")
_END: Final = re.compile(r"[\s:=#'\"(\[.{<|~-]*\Z")
_DELIMITER: Final = re.compile(r"[|,;{}\[\]\t<>]|[)\]] |\s{2,}| - |: |\A[A-Z]{4,8}:[\w.]{1,40}:")
"""The last one is the head of Python's logging."""
_UNIT_BEHIND: Final = re.compile(r"\(([A-Za-z/µ]{1,12})\)\Z")
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z]|times?\b)")
_LONGEST: Final = 120


def numbers_in(text: str) -> list[Named]:
    """All numbers of a line with what stands before each; of a progress bar its count and its clock."""
    numbers, end = list[Named](), 0
    for hit in _NUMBER.finditer(text):
        unit, last = (hit["unit"] or ""), hit.end()
        bare = unit.strip().lower()
        if bare == "<" and ":" in hit["value"] and numbers and numbers[-1].total:
            return [numbers[-1], Named(BAR, hit["value"])]
        is_name = unit[:1] == " " and text[last : last + 1] in {"_", "=", ":"}  # of the next number
        if bare and (is_name or not (bare in UNITS_S or bare in _OTHER_UNITS or _RATIO.fullmatch(bare))):
            if unit[0] != " ":
                continue  # as in 0x1b or 3rd
            bare, last = "", hit.start("unit")
        before = text[max(end, hit.start() - _LONGEST) : hit.start()]
        numbers.append(Named(before, hit["value"], bare, hit["total"] or ""))
        end = last
    return numbers


def numbers_of(row: Mapping[Any, Any]) -> list[Named]:
    """The same of a row with named columns; anything but numbers is left out."""
    numbers = []
    for name, value in row.items():
        if isinstance(name, str) and len(name) < 200 and isinstance(value, int | float | str):
            hit = _NUMBER.fullmatch(str(value)[:40].strip())
            if hit is not None and not isinstance(value, bool):
                numbers.append(Named(name, hit["value"], (hit["unit"] or "").strip().lower(), hit["total"] or ""))
    return numbers


_STEP: Final = re.compile(
    r"(?:(?:global|train|training|current|completed|optimizer|trainer) )*"
    r"(?:steps?|it|iters?|iterations?|iter num|step num|batch|batches|batch idx|updates?|num updates|schritt|"
    r"global step max steps|current steps)"
)
_OTHERS: Final[Mapping[str, Any]] = (
    dict.fromkeys(("epoch", "epochs", "train epoch", "training epoch", "epoch train"), "epoch")
    | dict.fromkeys(("rank", "global rank"), "rank")
    | dict.fromkeys(("timestamp", "time stamp", "created at", "unix time", "epoch time"), "stamp")
    | dict.fromkeys(SETTINGS, "setting")
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LEADING: Final = _words("info debug warning trainer root main log logger at in for end of after finished done")
_UNITS_BEHIND: Final = _words("s sec secs seconds ms msec msecs milliseconds us usec microseconds ns")
COUNTED: Final = {
    word: of
    for of, words in (
        ("step", "step steps iter iters iteration iterations it batches updates"),
        ("sample", "sample samples sequences examples"),
        ("token", "token tokens tok tps words"),
        ("image", "images image imgs img"),
    )
    for word in words.split()
}
"""What a speed counts, by the words of its name."""
_BAD: Final = _words(
    """
    eta remaining left eval valid validation val test inference compile compilation checkpoint ckpt save saving
    timeout warmup max peak lr startup init initialization setup memory mem epoch
    """
)
_TIMES: Final = _words("time timing times duration latency cost took elapsed dt seconds sec secs ms t")
_STEPS: Final = _words("step steps iter iters iteration iterations batch update it")
_CLOCKS: Final = _words("elapsed wall train training running run clock since start so far")
_MEANS: Final = _words("avg average mean")
_PLAIN: Final = _TIMES | _MEANS | _words("last current cur per this in for the took full val total")
_PHASES: Final = _words(
    """
    data dataloader dataload loader loading load reader read fetch prefetch forward fwd backward bwd optimizer optim
    opt allreduce reduce comm communication sync gather scatter h2d device copy clip clipping loss scheduler rest
    inner microstep gen generate generation rollout actor critic ref reward adv preprocess postprocess model compute
    gpu cpu host wait params grads generator batch-generator log logging
    """
)
_BARE: Final = _words("data forward backward fwd bwd optimizer allreduce")


@lru_cache(maxsize=16384)
def role_of(raw: str, unit: str = "") -> Role | None:
    """What a number is, by the text before it and the unit behind it; None for what is of no use here."""
    if raw == BAR:
        return Role("value", BAR, "elapsed", 1.0, TRUST_BAR, "interval")
    text = _END.sub("", raw)
    behind = _UNIT_BEHIND.search(text)
    if behind is not None and (behind[1].lower() in UNITS_S or "/" in behind[1]):
        unit, text = unit if unit in UNITS_S else behind[1].lower(), text[: behind.start()]
    text = _DELIMITER.split(text)[-1]
    words = re.sub(r"[^a-z0-9µ/]+|/", " ", _CAMEL.sub(" ", text).lower()).split()[-6:]
    words = words[max((k + 1 for k, word in enumerate(words) if word[0].isdecimal()), default=0) :]
    while len(words) > 1 and words[0] in _LEADING:
        del words[0]
    if len(words) > 1 and words[-1] in _UNITS_BEHIND and not _is_speed(words, text):
        unit = unit if unit in UNITS_S else words[-1]
        words = words[:-2] if words[-2] == "in" else words[:-1]
    name = " ".join(words)
    if unit == "t":  # as in "Data (t): 0.1"
        return _time(name, frozenset(words) | {"time"}, 1.0)
    if unit not in UNITS_S and _STEP.fullmatch(name):
        return Role("step", name, trust=0 if "global" in name else 2 if "batch" in name else 1)
    if name in _OTHERS:
        return Role(_OTHERS[name], name, "elapsed")
    return _speed(name, unit) or _time(name, frozenset(words), UNITS_S.get(unit))


def _is_speed(words: list[str], text: str) -> bool:
    """As in ``tok/sec``; ``iter_s`` and ``sec_per_iter_s`` are times none the less."""
    counted = COUNTED.get(words[-2], "") if "per" not in words and not words[-1].startswith(("m", "u", "n")) else ""
    return words[-2] == "per" or (counted != "" and (counted != "step" or text.lower().endswith(f"/{words[-1]}")))


_SECOND: Final = r"(?:s|secs?|seconds?)"
_STEPS_PER_S: Final = re.compile(
    rf"(?:.* )?(?:ups|(?:steps?|iters?|iterations?|it|batches|updates)(?: per | ){_SECOND})"
)
_RATE: Final = re.compile(
    r"(?:.* )?(?:tps|wps|ips|throughput|speed|(?:samples|tokens?|tok|images|imgs?|words|sequences|examples)"
    rf"(?: per | ){_SECOND}(?: per gpu| gpu)?)"
)
_STEP_UNIT: Final = r"(?:it|iters?|iterations?|steps?|batch|batches|updates?)"
_PER_STEP: Final = re.compile(rf"([a-zµ]+)/{_STEP_UNIT}")
_STEPS_IN_S: Final = re.compile(rf"{_STEP_UNIT}/{_SECOND}")
_RATE_UNIT: Final = re.compile(rf"(?!.?i?b/|.?flops?/)[a-z]{{0,10}}/{_SECOND}(?:/gpu|/device)?")


def _speed(name: str, unit: str) -> Role | None:
    per_step = _PER_STEP.fullmatch(unit)
    if per_step is not None and per_step[1] in UNITS_S:
        return Role("value", name, "step time", UNITS_S[per_step[1]], 2)
    if _STEPS_IN_S.fullmatch(unit) or _STEPS_PER_S.fullmatch(name):
        return Role("value", name, "steps a second", 1.0, 3)
    if _RATE.fullmatch(name) or _RATE_UNIT.fullmatch(unit):
        return Role("value", name, "speed", 1.0, 8 + ("avg" in name), "interval")
    return None


def _time(name: str, words: frozenset[str], unit_s: float | None) -> Role | None:
    """A name that says a time; a part of a step without a unit is one only beside a time (unit None)."""
    if name in _BARE and not unit_s:
        return Role("phase", name, "step time", None)
    if not (words & _TIMES or unit_s) or words & _BAD or ("per" in words and not words & _STEPS):
        return None
    if unit_s is None and len(said := words & _UNITS_BEHIND) == 1:
        unit_s = UNITS_S[next(iter(said))]
    if words & _PHASES:
        return Role("phase", name, "step time", unit_s)
    if words & _STEPS:
        return Role("value", name, "step time", unit_s, 7 if words & _MEANS else 2)
    if not words or (words & _CLOCKS and words <= _TIMES | _CLOCKS):
        return Role("value", name, "elapsed or step time" if words else "step time", unit_s, 5)
    if words <= _PLAIN:
        kind: Kind = "elapsed or step time" if "total" in words or name == "time" else "step time"
        return Role("value", name, kind, unit_s, 4)
    return Role("phase", name, "step time", unit_s, 1) if unit_s else None
