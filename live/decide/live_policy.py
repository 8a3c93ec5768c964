"""The policy of a live job, by name, from a file, or as an object, with its origin.

An invalid policy is a reason to observe, not to stop a job: nothing here raises.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

from paceenv.core.errors import InputError
from paceenv.live.log_once import described
from paceenv.live.options import PACED
from paceenv.policies.base import Policy
from paceenv.policies.names import STATIC_DEFAULTS, find, rule, spelled
from paceenv.policies.rules import passive

SEPARATOR, DEFAULTS = ";", "defaults"
"""Of the option ``candidates``; and the name of all of :data:`DEFAULT_CONSTANTS`."""
DEFAULT_CONSTANTS = tuple(spelled({mechanism: pair}) for mechanism, pair in STATIC_DEFAULTS.items())
"""The default constant of each mechanism."""


class NamedPolicy(NamedTuple):
    """A policy with its origin; ``fault`` is the reason why it cannot be followed, or "". With candidates passive.

    ``sha256`` is of the policy's file or, where a cluster config gives its numbers, of these numbers.
    """

    policy: Policy
    source: str
    sha256: str | None = None
    fault: str = ""
    candidates: tuple[NamedPolicy, ...] = ()
    """What takes turns in modes canary and active."""


def find_policy(given: Policy | str | os.PathLike[str] | None) -> NamedPolicy:
    """The policy that ``given`` names; a passive one with a ``fault`` where it cannot be had."""
    if given is None:
        return NamedPolicy(passive(), "none", fault="no policy was given; allowed: a policy, such as learned")
    if isinstance(given, Policy):
        return NamedPolicy(given, type(given).__name__)
    text = str(given)
    try:
        named = rule(text)
        if named is None:
            path, content = find(text)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            return NamedPolicy(content.policy, text, digest)
        from_a_file = named.name != text  # its name has the numbers: another host may have others under this text
        return NamedPolicy(named, text, hashlib.sha256(named.name.encode()).hexdigest() if from_a_file else None)
    except Exception as error:  # a hostile file may raise anything
        reason = str(error) if isinstance(error, InputError) else f"policy {text}: {described(error)}"
        return NamedPolicy(passive(), text, fault=reason)


def needed_policy(mode: str, policy: Policy | str | os.PathLike[str] | None, candidates: str) -> NamedPolicy:
    """What a mode decides by: the policy or, where it has several, the candidates (option) and the policy.

    With a fault in one of them nothing is paced: every rank must have the same.
    """
    more = find_policy(policy)
    if mode not in PACED or not candidates:
        return more
    names = list[str]()
    for part in filter(None, (part.strip() for part in candidates.split(SEPARATOR))):
        names += DEFAULT_CONSTANTS if part == DEFAULTS else [part]
    policies = [find_policy(name) for name in dict.fromkeys(names)]
    if policy is not None and more.source not in names:
        policies.append(more)
    faults = [one.fault for one in policies if one.fault]
    digest = hashlib.sha256(repr([(one.source, one.sha256) for one in policies]).encode()).hexdigest()
    fault = faults[0] if faults else "" if policies else f"candidates = {candidates!r}; allowed: at least one policy"
    source = SEPARATOR.join(one.source for one in policies)
    return NamedPolicy(passive(), source, digest, fault=fault, candidates=tuple(policies))
