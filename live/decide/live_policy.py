"""The policy of a live job, by name, from a file, or as an object, with its origin.

An invalid policy is a reason to observe, not to stop a job: nothing here raises.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceenv.core.errors import InputError
from paceenv.policies.base import Policy
from paceenv.policies.learned import Learned
from paceenv.policies.names import NAMES, NEED_SIMULATOR, rule
from paceenv.policies.rules import passive


@dataclass(frozen=True)
class NamedPolicy:
    """A policy with its origin; ``fault`` is the reason why it cannot be followed, or ""."""

    policy: Policy
    source: str
    sha256: str | None = None
    calibrated_range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    fault: str = ""


def at_interval(named: NamedPolicy, interval_iterations: int | None) -> NamedPolicy:
    """The policy at that control interval, None for its own; with a fault if it was trained with another one."""
    own = named.policy.interval_iterations
    if named.fault or interval_iterations is None or interval_iterations == own:
        return named
    if not isinstance(named.policy, Learned):
        named.policy.interval_iterations = interval_iterations
        return named
    why = f"interval_iterations = {interval_iterations}; allowed: {own}, with which policy {named.source} was trained"
    return replace(named, policy=passive(), fault=why)


def find_policy(given: Policy | str | os.PathLike[str] | None) -> NamedPolicy:
    """The policy that ``given`` names; a passive one with a ``fault`` where it cannot be had."""
    if given is None:
        return NamedPolicy(passive(), "none given", fault="no policy was given")
    if isinstance(given, Policy):
        known = given.calibrated_range if isinstance(given, Learned) else {}
        return NamedPolicy(given, type(given).__name__, calibrated_range=known)
    text = str(given)
    try:
        if text in NEED_SIMULATOR:
            raise InputError(
                f"policy {text}: needs the simulator; allowed live: {', '.join(NAMES)} or a .safetensors file"
            )
        named = rule(text)
        return NamedPolicy(named, text) if named is not None else _from_file(text)
    except Exception as error:  # a hostile file may raise anything
        reason = str(error) if isinstance(error, InputError) else f"policy {text}: {type(error).__name__}: {error}"
        return NamedPolicy(passive(), text, fault=reason)


def _from_file(text: str) -> NamedPolicy:
    from paceenv.policies import saved

    path, content = saved.find(text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return NamedPolicy(content.policy, text, digest, content.calibrated_range)
