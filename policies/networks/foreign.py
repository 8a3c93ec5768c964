"""Agents that paceenv did not train, as command lines spell them: ``module:Class``, ``agent.zip``, ``agent.onnx``.

A file names neither the mechanisms that its actions set nor its control interval, so the text may have options:
``agent.zip:mechanisms=slack/phase_shift,interval_iterations=20,preference=0.3``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from paceenv.core import pacing
from paceenv.core.errors import InputError, out_of_range
from paceenv.policies.base import INTERVAL_ITERATIONS, Policy
from paceenv.policies.networks import own_class

_SUFFIXES = (".zip", ".onnx")
_OPTIONS = ("mechanisms", "interval_iterations", "preference")
HELP = (
    "an agent of your own: module:Class (this runs its code), agent.zip of Stable-Baselines3 (its weights only), or "
    "agent.onnx; the two files with the mechanisms that their actions set: agent.zip:mechanisms=slack/phase_shift"
)


@dataclass(frozen=True)
class _Given:
    """A file and its options."""

    path: Path
    mechanisms: tuple[str, ...] = ()
    interval_iterations: int = INTERVAL_ITERATIONS
    preference: float | None = None
    text: str = field(default="", compare=False)


def file_of(text: str) -> Path | None:
    """The agent's file that ``text`` names, with or without options; None where it names none."""
    for suffix in _SUFFIXES:
        if text.endswith(suffix):
            return Path(text)
        name, separator, _ = text.partition(f"{suffix}:")
        if separator:
            return Path(name + suffix)
    return None


def foreign_policy(text: str) -> Policy | None:
    """The policy that ``text`` names, None where it names none of these; InputError where it cannot be had."""
    path = file_of(text)
    if path is None:
        return own_class.load_class(text) if own_class.names_class(text) else None
    given = _options(text, path)
    if not path.is_file():
        raise InputError(f"policy {text}: no such file; allowed: a {path.suffix} file")
    if path.suffix == ".onnx":
        from paceenv.policies.networks.onnx_policy import OnnxPolicy

        interval = given.interval_iterations
        return OnnxPolicy(path, given.mechanisms, preference=given.preference, interval_iterations=interval)
    return _from_zip(given)


def _from_zip(given: _Given) -> Policy:
    from paceenv.policies.learned import Learned
    from paceenv.policies.networks.sb3_zip import read_actor

    actor = read_actor(given.path)
    actions = len(actor.layers[-1][1])
    if actions != 2 * len(given.mechanisms):
        named = f"{len(given.mechanisms)} mechanisms, of two actions each"
        raise InputError(f"policy {given.text}: {actions} actions; allowed: {2 * len(given.mechanisms)} for {named}")
    return Learned(
        actor.layers,
        given.mechanisms,
        given.path.stem,
        given.preference,
        interval_iterations=given.interval_iterations,
        squashes=actor.squashes,
        activation=actor.activation,
        cell=actor.cell,
    )


def _options(text: str, path: Path) -> _Given:
    """The options after the file's name; InputError for others, and without mechanisms."""
    found: dict[str, str] = {}
    for option in filter(None, text.removeprefix(str(path)).removeprefix(":").split(",")):
        key, separator, value = option.partition("=")
        if not separator or key not in _OPTIONS or key in found:
            raise InputError(f"policy {text}: option {option}; allowed: {'=, '.join(_OPTIONS)}=, each once")
        found[key] = value
    mechanisms = tuple(filter(None, found.get("mechanisms", "").split("/")))
    if not mechanisms or len(set(mechanisms)) < len(mechanisms) or not set(mechanisms) <= set(pacing.MECHANISMS):
        known = ", ".join(pacing.MECHANISMS)
        allowed = f"{path.name}:mechanisms=slack/phase_shift, in the order of its actions, of {known}"
        raise InputError(f"policy {text}: mechanisms = {found.get('mechanisms', '')!r}; allowed: {allowed}")
    try:
        interval = int(found.get("interval_iterations", INTERVAL_ITERATIONS))
        preference = float(found["preference"]) if "preference" in found else None
    except ValueError as error:
        raise InputError(f"policy {text}: {error}; allowed: numbers for interval_iterations and preference") from None
    if preference is not None and not 0.0 <= preference < math.inf:
        raise out_of_range("preference", preference, "at least 0", f"policy {text}")
    if interval < 1:
        raise out_of_range("interval_iterations", interval, "at least 1", f"policy {text}")
    return _Given(path, mechanisms, interval, preference, text)
