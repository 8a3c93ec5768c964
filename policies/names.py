"""Policies by name or file, as command lines, suites and a live job spell them: rules, ``learned`` and policy files.

Needs numpy, PyYAML for ``static:FILE.yaml`` and safetensors for files: a production node has no pydantic and no
simulator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceenv.core import files, pacing
from paceenv.core.errors import InputError, did_you_mean, out_of_range
from paceenv.core.pacing import Candidate
from paceenv.policies.base import Policy
from paceenv.policies.rules import Adaptive, Static, paper, passive

if TYPE_CHECKING:
    from paceenv.policies.policy_file import PolicyFile

RULES: dict[str, Callable[[], Policy]] = {"passive": passive, "paper": paper, "adaptive": Adaptive}
STATIC_DEFAULTS: Mapping[str, tuple[float, float]] = {
    "slack": (0.02, 0.4),
    "phase_shift": (0.05, 0.4),
    "stagger": (0.5, 0.4),
    "mean_slack": (0.02, 0.1),
}
"""(threshold, window) of ``static`` for a mechanism without given settings; the paper's rule has its own name."""
DEFER_DEFAULT = (0.0, 0.1)
"""The same of ``defer``, which only jobs with transfers that can wait have a use for."""
LEARNED = "learned"
"""The name of the policy file that is released with the package, ``policies/learned.safetensors``."""
NAMES = (*RULES, "static", LEARNED)
AHEAD = "clairvoyant"
"""The look-ahead plan, which needs the simulator; ``paceenv.policies.select`` makes it, a live job cannot."""
_SUFFIX = ".safetensors"


def spelled(settings: Candidate) -> str:
    """The static policy with these settings, as command lines spell it; without any mechanism passive."""
    options = ",".join(f"{m}={threshold:g}/{window:g}" for m, (threshold, window) in settings.items())
    return f"static:{options}" if options else "passive"


def rule(text: str, default: tuple[str, float, float] = ("slack", *STATIC_DEFAULTS["slack"])) -> Policy | None:
    """The hand-written policy that ``text`` names.

    Args:
        text: ``passive``, ``paper``, ``adaptive``, ``static``, or ``static`` with settings:
            ``static:slack=0.02/0.3,phase_shift=0.05/0.05`` (threshold/window of each mechanism), or
            ``static:my-cluster.yaml`` (section ``pacing`` of a cluster config).
        default: (mechanism, threshold, window) of ``static`` alone.

    Returns:
        The policy, or None where ``text`` does not name a hand-written policy.

    Raises:
        InputError: unknown options, values out of range, or a cluster config without a valid section ``pacing``.
    """
    name, separated, options = text.partition(":")
    if text in RULES:
        return RULES[text]()
    if name != "static":
        return None
    if not separated:
        return Static({default[0]: default[1:]}, name=text)
    if options.endswith(files.YAML_SUFFIXES):
        return _static_of_cluster(text, options)
    settings: dict[str, tuple[float, float]] = {}
    for option in options.split(","):
        mechanism, _, values = option.partition("=")
        threshold, _, window = values.partition("/")
        if mechanism not in pacing.MECHANISMS or mechanism in settings:
            allowed = f"static:MECHANISM=THRESHOLD/WINDOW, each of {', '.join(pacing.MECHANISMS)} once"
            raise InputError(f"policy {text}: {option!r}; allowed: {allowed}, or static:CLUSTER.yaml")
        settings[mechanism] = _pair(mechanism, threshold, window, f"policy {text}")
    return Static(settings, name=text)


def _static_of_cluster(text: str, cluster: str) -> Static:
    """Fixed settings from section ``pacing`` of a cluster config; their numbers are in its name."""
    try:
        path = files.find("clusters", cluster)
        section = files.read_yaml(path).get("pacing")
    except InputError as error:
        raise InputError(f"policy {text}: {error}") from None
    where, keys = f"policy {text}: {path}", ("mechanism", "threshold", "window")
    if not isinstance(section, dict) or not section.keys() <= set(keys):
        raise out_of_range("pacing", section, f"a section with the keys {', '.join(keys)}", where)
    mechanism, threshold, window = (section.get(*one) for one in zip(keys, pacing.CLUSTER_DEFAULT, strict=True))
    allowed = (*STATIC_DEFAULTS, "defer")
    if mechanism not in allowed:
        raise out_of_range("pacing.mechanism", mechanism, f"one of {', '.join(allowed)}", where)
    settings = {mechanism: _pair(mechanism, threshold, window, where)}
    return Static(settings, name=spelled(settings))


def _pair(mechanism: str, threshold: Any, window: Any, where: str) -> tuple[float, float]:
    """Two numbers from 0 to 1; also as text, because YAML reads 1e-2 as text."""
    try:
        pair = float(threshold), float(window)
    except (TypeError, ValueError):
        pair = math.nan, math.nan
    if not all(0.0 <= value <= 1.0 for value in pair) or bool in (type(threshold), type(window)):
        raise out_of_range(mechanism, f"{threshold}/{window}", "threshold/window, both numbers from 0 to 1", where)
    return pair


def released() -> Path:
    """The path of the released policy, whether it exists or not."""
    return Path(str(importlib.resources.files("paceenv.policies"))) / f"{LEARNED}{_SUFFIX}"


def find(text: str, known: Sequence[str] = NAMES) -> tuple[Path, PolicyFile]:
    """The policy file that ``text`` names, and its content.

    ``text`` is ``learned`` or a file, also with a preference: ``FILE.safetensors:preference=0.3``.

    Args:
        known: the allowed names, for the error message.

    Raises:
        InputError: for an unknown name, an invalid file, and a preference that the policy does not take.
    """
    from paceenv.policies.policy_file import load_policy  # only here: rules do not need safetensors

    name, preference = _parts(text)
    if name == LEARNED:
        path = released()
        if not path.is_file():
            raise InputError(f"policy {text}: none is released yet; allowed: a {_SUFFIX} file written by paceenv train")
    else:
        path = Path(name)
        if path.suffix != _SUFFIX and not path.exists():
            hint = did_you_mean(name.partition(":")[0], known)
            raise InputError(f"policy {text}: no such file; allowed: {', '.join(known)} or a {_SUFFIX} file{hint}")
    content = load_policy(path)
    if preference is not None:
        content = dataclasses.replace(content, policy=content.policy.with_preference(preference))
    return path, content


def _parts(text: str) -> tuple[str, float | None]:
    """The name and the preference in ``text``; an existing file counts as a file, whatever its name is."""
    name, _, option = text.rpartition(":")
    if not (name == LEARNED or name.endswith(_SUFFIX)) or Path(text).exists():
        return text, None
    key, _, value = option.partition("=")
    if key == "preference":
        with contextlib.suppress(ValueError):
            return name, float(value)
    raise InputError(f"policy {text}: unknown option {option}; allowed: preference=NUMBER")
