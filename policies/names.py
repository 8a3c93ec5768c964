"""Policies by name, as command lines, suites and a live job spell them, and the hand-written ones; needs numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceenv.core import pacing
from paceenv.core.errors import InputError
from paceenv.core.renames import RENAMED_MECHANISMS, mechanism_name
from paceenv.policies.base import Policy
from paceenv.policies.rules import Adaptive, Static, paper, passive

RULES: dict[str, Callable[[], Policy]] = {"passive": passive, "paper": paper, "adaptive": Adaptive}
STATIC_DEFAULTS: Mapping[str, tuple[float, float]] = {
    "slack": (0.02, 0.4),
    "phase_shift": (0.05, 0.4),
    "stagger": (0.5, 0.4),
}
"""(threshold, window) of ``static`` for a mechanism whose settings nobody gave; the paper's rule has its own name."""
LEARNED = "learned"
"""The name of the policy file that is released with the package; see ``paceenv.policies.saved``."""
NAMES = (*RULES, "static", LEARNED)
NEED_SIMULATOR = ("projection", "clairvoyant")
"""Policies that look ahead in the simulator of a cluster; ``paceenv.policies.select`` makes them, a live job cannot."""
_OPTIONS = ("mechanism", "threshold", "window")


def rule(text: str, default: tuple[str, float, float] | None = None) -> Policy | None:
    """The hand-written policy that ``text`` names, or None if it names none.

    ``static:mechanism=phase_shift,threshold=0.1,window=0.05`` takes what it is not told from ``default``, (mechanism,
    threshold, window), and without one from :data:`STATIC_DEFAULTS`. ``static:slack=0.02/0.3,phase_shift=0.05/0.05``
    has several mechanisms on at once, each with its threshold/window. Raises InputError for options that are none.
    """
    name, separated, options = text.partition(":")
    if text in RULES:
        return RULES[text]()
    if name != "static":
        return None
    if separated and not options.strip(","):
        raise InputError(f"policy {text}: no options; allowed: static alone, or such as static:slack=0.1/0.2")
    given: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, separator, value = option.partition("=")
        if not separator or key not in {*_OPTIONS, *pacing.MECHANISMS, *RENAMED_MECHANISMS}:
            allowed = "mechanism=, threshold=, window=, or threshold/window by mechanism"
            raise InputError(f"policy {text}: unknown option {key}; allowed: {allowed}")
        key = mechanism_name(key)
        if key in given:
            raise InputError(f"policy {text}: {key}= given twice; allowed: once")
        given[key] = value
    if given.keys() <= set(_OPTIONS):
        return Static(_one(text, given, default), name=text)
    if given.keys() & set(_OPTIONS):
        raise InputError(
            f"policy {text}: mechanism=, threshold= or window= beside a mechanism by name; allowed: either"
        )
    return Static({mechanism: _pair(text, mechanism, value) for mechanism, value in given.items()}, name=text)


def _one(
    text: str, given: Mapping[str, str], default: tuple[str, float, float] | None
) -> dict[str, tuple[float, float]]:
    """Settings of one mechanism from what is ``given`` of its name, threshold and window."""
    mechanism = mechanism_name(given.get("mechanism")) or (default[0] if default else "slack")
    known = default[1:] if default else STATIC_DEFAULTS.get(mechanism, (0.0, 0.0))
    threshold, window = (
        _number(text, key, given[key]) if key in given else value
        for key, value in zip(("threshold", "window"), known, strict=True)
    )
    return {mechanism: (threshold, window)}


def _pair(text: str, mechanism: str, value: str) -> tuple[float, float]:
    threshold, separator, window = value.partition("/")
    if not separator:
        raise InputError(f"policy {text}: {mechanism} = {value!r}; allowed: threshold/window, both 0 to 1")
    return _number(text, f"threshold of {mechanism}", threshold), _number(text, f"window of {mechanism}", window)


def _number(text: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"policy {text}: {key} = {value!r}; allowed: 0 to 1") from None
