"""Numbers with names in any line: ``name: value``, ``name=value``, ``name value unit``, and what each name stands for.

A name is the text between two numbers, as far back as a delimiter; what it means is told by its words and its unit.
Formats whose words alone would mislead, or that say how many steps a value averages over, stand in one small table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from paceenv.importers.log_text.conversion import Kind

Averages = Literal["interval", "one step", "unknown"]
Meaning = Literal["step", "epoch", "rank", "stamp", "value", "phase"]


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
    """What one program writes: the words of its value, something else in the same line, and what the value is."""

    program: str
    words: str
    needle: str
    kind: Kind
    averages: Averages


FORMATS: Final = (
    Format("Megatron-LM", "elapsed time per iteration", "", "step time", "interval"),
    Format("NeMo", "train step timing", "", "step time", "one step"),
    Format("DeepSpeed", "iter time", "samples/sec", "step time", "interval"),
    Format("MaxText", "seconds", "completed step", "step time", "one step"),
    Format("LitGPT", "iter time", "iter ", "step time", "one step"),
    Format("nanoGPT", "time", "iter ", "step time", "one step"),
    Format("build-nanogpt", "dt", "", "step time", "one step"),
    Format("llm.c", "", "tok/s", "step time", "one step"),
    Format("modded-nanogpt", "train time", "step_avg", "elapsed", "interval"),
    Format("torchtitan", "tps", "loss:", "speed", "interval"),
    Format("torchtitan", "wps", "loss:", "speed", "interval"),
    Format("DeepSpeed (samples/s)", "curr samples per sec", "", "speed", "one step"),
    Format("ms-swift", "train speed", "global_step", "mean speed", "interval"),
    Format("detectron2, MMEngine", "time", "data_time", "step time", "interval"),
)
"""Before the general rules."""

UNITS_S: Final[Mapping[str, float]] = (
    dict.fromkeys(("s", "sec", "secs", "second", "seconds", "t"), 1.0)
    | dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1e-3)
    | dict.fromkeys(("us", "µs", "μs", "usec", "usecs", "microseconds"), 1e-6)
    | dict.fromkeys(("ns", "nanoseconds"), 1e-9)
    | dict.fromkeys(("min", "mins", "minutes"), 60.0)
    | dict.fromkeys(("h", "hrs", "hours"), 3600.0)
)
_OTHER_UNITS: Final = frozenset(
    ("%", "k", "m", "g", "b", "kb", "mb", "gb", "tb", "mib", "gib", "kib", "tib", "tflops", "flops", "x")
)
_NUMBER: Final = re.compile(
    r"(?<![\w.+\-])(?P<value>\d{1,6}:\d\d(?::\d\d)?(?![\d:])|"
    r"\d{1,20}(?:,\d{1,9}){0,4}(?:\.\d{0,18})?(?:[eE][+-]?\d{1,3})?)(?![\d.:]*\d)"
    r"(?: ?/ ?(?P<total>\d{1,15})(?![\w.]))?(?P<unit> ?(?:[A-Za-zµμ%]{1,12}(?:/[A-Za-z]{1,10}){0,2}|/[A-Za-z]{1,6}))?"
)
_END: Final = re.compile(r"[\s:=#'\"(\[.{<|~-]*\Z")
_DELIMITER: Final = re.compile(r"[|,;{}\[\]\t<>]|[)\]] |\s{2,}| - |: ")
_UNIT_BEHIND: Final = re.compile(r"\(([A-Za-z/µ]{1,12})\)\Z")
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_LONGEST: Final = 120


def numbers_in(text: str) -> list[Named]:
    """All numbers of a line with what stands before each."""
    found, end = [], 0
    for hit in _NUMBER.finditer(text):
        unit, last = (hit["unit"] or ""), hit.end()
        bare = unit.strip().lower()
        if bare and not (bare in UNITS_S or bare in _OTHER_UNITS or "/" in bare):
            if unit[0] != " ":
                continue  # as in 0x1b or 3rd
            bare, last = "", hit.start("unit")
        found.append(
            Named(text[max(end, hit.start() - _LONGEST) : hit.start()], hit["value"], bare, hit["total"] or "")
        )
        end = last
    return found


def numbers_of(row: Mapping[Any, Any]) -> list[Named]:
    """The same of a row with named columns; anything but numbers is left out."""
    found = []
    for name, value in row.items():
        if isinstance(name, str) and len(name) < 200 and not isinstance(value, bool):
            text = str(value)[:40] if isinstance(value, int | float | str) else ""
            hit = _NUMBER.fullmatch(text.strip())
            if hit is not None:
                found.append(Named(name, hit["value"], (hit["unit"] or "").strip().lower(), hit["total"] or ""))
    return found


_STEP: Final = re.compile(
    r"(?:(?:global|train|training|current|completed|optimizer|trainer) )*"
    r"(?:steps?|it|iters?|iterations?|iter num|step num|batch|batches|batch idx|updates?|num updates|schritt|"
    r"global step max steps|current steps)"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LEADING: Final = _words("info debug warning trainer root main log logger at in for end of after finished done")
_UNITS_BEHIND: Final = _words("s sec secs seconds ms msec msecs milliseconds us usec microseconds ns")
_COUNTED: Final = _words(
    """
    step steps iter iters iteration iterations it batches updates samples sample token tokens tok images image imgs
    img words sequences examples
    """
)
_BAD: Final = _words(
    """
    eta remaining left eval valid validation val test inference compile compilation checkpoint ckpt save saving
    timeout warmup max peak lr startup init initialization setup memory mem epoch
    """
)
_TIMES: Final = _words("time timing times duration latency cost took elapsed dt seconds sec secs ms t")
_STEPS: Final = _words("step steps iter iters iteration iterations batch update it")
_CLOCKS: Final = _words("elapsed total wall train training running runtime clock since start so far")
_PLAIN: Final = _TIMES | _words("last current cur avg average mean per this in for the took full val")
_PHASES: Final = _words(
    """
    data dataloader dataload loader loading load reader read fetch prefetch forward fwd backward bwd optimizer optim
    opt allreduce reduce comm communication sync gather scatter h2d device copy clip clipping loss scheduler rest
    inner microstep gen generate generation rollout actor critic ref reward adv preprocess postprocess model compute
    gpu cpu host wait params grads generator batch-generator log logging
    """
)


@lru_cache(maxsize=16384)
def role_of(raw: str, unit: str = "") -> Role | None:
    """What a number is, by the text before it and the unit behind it; None for what is of no use here."""
    text = _END.sub("", raw)
    behind = _UNIT_BEHIND.search(text)
    if behind is not None and (behind[1].lower() in UNITS_S or "/" in behind[1]):
        unit, text = unit if unit in UNITS_S else behind[1].lower(), text[: behind.start()]
    text = _DELIMITER.split(text)[-1]
    words = re.sub(r"[^a-z0-9µ/]+|/", " ", _CAMEL.sub(" ", text).lower()).split()[-6:]
    words = words[max((k + 1 for k, word in enumerate(words) if word[0].isdecimal()), default=0) :]
    while len(words) > 1 and words[0] in _LEADING:
        del words[0]
    if len(words) > 1 and words[-1] in _UNITS_BEHIND and not _is_speed(words):
        unit = unit if unit in UNITS_S else words[-1]
        words = words[:-2] if words[-2] == "in" else words[:-1]
    name = " ".join(words)
    if unit in UNITS_S and unit == "t":
        return _time(name, frozenset(words) | {"time"}, 1.0)
    if unit not in UNITS_S and _STEP.fullmatch(name):
        return Role("step", name, trust=0 if "global" in name else 2 if "batch" in name else 1)
    if name in {"epoch", "epochs", "train epoch", "training epoch", "epoch train"}:
        return Role("epoch", name)
    if name in {"rank", "global rank"}:
        return Role("rank", name)
    if name in {"timestamp", "time stamp", "created at", "unix time", "epoch time"}:
        return Role("stamp", name, "elapsed", 1.0, 6, "interval")
    return _speed(name, unit) or _time(name, frozenset(words), UNITS_S.get(unit), said=unit in UNITS_S)


def _is_speed(words: list[str]) -> bool:
    """As in ``tok/sec``; ``step_s`` and ``iter_ms`` are times none the less."""
    return words[-2] == "per" or (
        words[-2] in _COUNTED and words[-1] in {"s", "sec", "secs", "seconds"} and words[-2:] != ["step", "s"]
    )


_STEPS_PER_S: Final = re.compile(
    r"(?:.* )?(?:ups|(?:steps?|iters?|iterations?|it|batches|updates)(?: per | )(?:s|secs?|seconds?))"
)
_RATE: Final = re.compile(
    r"(?:.* )?(?:tps|wps|ips|throughput|speed|(?:samples|tokens?|tok|images|imgs?|words|sequences|examples)"
    r"(?: per | )(?:s|secs?|seconds?)(?: per gpu| gpu)?)"
)
_PER_STEP: Final = frozenset(
    f"{s}/{it}" for s in UNITS_S for it in ("it", "iter", "iteration", "step", "batch", "update")
)
_STEPS_IN_S: Final = re.compile(r"(?:it|iters?|iterations?|steps?|batch|batches|updates?)/(?:s|sec|second)")


def _speed(name: str, unit: str) -> Role | None:
    if unit in _PER_STEP:
        return Role("value", name, "step time", UNITS_S[unit.partition("/")[0]], 2)
    if _STEPS_IN_S.fullmatch(unit) or _STEPS_PER_S.fullmatch(name):
        return Role("value", name, "steps a second", 1.0, 3)
    if _RATE.fullmatch(name) or re.fullmatch(r"[a-z]{0,10}/(?:s|sec|second)", unit):
        return Role("value", name, "speed", 1.0, 8, "interval")
    return None


def _time(name: str, words: frozenset[str], unit_s: float | None, *, said: bool = True) -> Role | None:
    """A name that says a time."""
    if not (words & _TIMES or (said and unit_s)) or words & _BAD or ("per" in words and not words & _STEPS):
        return None
    if not words:
        return Role("value", name, "step time", unit_s, 5)
    if words & _PHASES:
        return Role("phase", name, "step time", unit_s)
    if words & _STEPS:
        mean = bool(words & {"avg", "average", "mean"})
        return Role("value", name, "step time", unit_s, 2 + mean)
    if words <= _TIMES | _CLOCKS and words & _CLOCKS and "total" not in words:
        return Role("value", name, "elapsed or step time", unit_s, 5)
    if words <= _PLAIN | {"total"} and words:
        return Role(
            "value", name, "elapsed or step time" if "total" in words or name == "time" else "step time", unit_s, 4
        )
    return Role("phase", name, "step time", unit_s) if said and words else None
