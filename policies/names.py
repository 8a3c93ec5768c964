"""The hand-written policies by name, as command lines, suites and a live job spell them; needs numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceenv.errors import InputError
from policies.base import Policy
from policies.rules import Adaptive, Static, paper, passive

RULES: dict[str, Callable[[], Policy]] = {"passive": passive, "paper": paper, "adaptive": Adaptive}
STATIC_DEFAULTS: Mapping[str, tuple[float, float]] = {
    "slack": Adaptive.SLACK_SETTING,
    "slide": Adaptive.SLIDE_SETTING,
    "stagger": Adaptive.STAGGER_SETTING,
}
"""(threshold, window) of ``static`` for a mechanism whose settings nobody gave; the paper's rule has its own name."""
NAMES = (*RULES, "static")


def rule(text: str, default: tuple[str, float, float] | None = None) -> Policy | None:
    """The hand-written policy that ``text`` names, or None if it names none.

    ``static:mechanism=slide,threshold=0.1,window=0.05`` takes what it is not told from ``default``, (mechanism,
    threshold, window), and without one from :data:`STATIC_DEFAULTS`. Raises InputError for options that are none.
    """
    name, _, options = text.partition(":")
    if text in RULES:
        return RULES[text]()
    if name != "static":
        return None
    given = dict(_option(text, option) for option in options.split(",") if option)
    mechanism = given.get("mechanism") or (default[0] if default else "slack")
    known = default[1:] if default else STATIC_DEFAULTS.get(mechanism, (0.0, 0.0))
    threshold, window = (
        _number(text, key, given[key]) if key in given else value
        for key, value in zip(("threshold", "window"), known, strict=True)
    )
    return Static(mechanism, threshold, window, name=text)


def _option(text: str, option: str) -> tuple[str, str]:
    key, separator, value = option.partition("=")
    if not separator or key not in {"mechanism", "threshold", "window"}:
        raise InputError(f"policy {text}: unknown option {key}; allowed: mechanism=, threshold=, window=")
    return key, value


def _number(text: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"policy {text}: {key} = {value!r}; allowed: 0 to 1") from None
