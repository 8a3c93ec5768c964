"""Policies by name or file, as command lines, suites and a live job spell them: rules, ``learned`` and policy files.

Needs numpy, PyYAML for ``static:FILE.yaml`` and safetensors for files: a production node has no pydantic and no
simulator.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceenv.core import files, pacing
from paceenv.core.errors import InputError, out_of_range
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
_OPTIONS = ("mechanism", "threshold", "window")
_SUFFIX = ".safetensors"


def rule(text: str, default: tuple[str, float, float] | None = None) -> Policy | None:
    """The hand-written policy that ``text`` names.

    Args:
        text: ``passive``, ``paper``, ``adaptive``, ``static``, or ``static`` with settings:
            ``static:mechanism=phase_shift,threshold=0.1,window=0.05`` (one mechanism),
            ``static:slack=0.02/0.3,phase_shift=0.05/0.05`` (threshold/window of several), or
            ``static:my-cluster.yaml`` and ``static:two-jobs`` (section ``pacing`` of a cluster config, a file or a
            packaged one).
        default: (mechanism, threshold, window) for settings that ``text`` leaves out; without it, and for another
            mechanism, :data:`STATIC_DEFAULTS`.

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
    if separated and not options.strip(","):
        raise InputError(f"policy {text}: no options; allowed: static alone, or such as static:slack=0.1/0.2")
    if _names_cluster(options):
        return _static_of_cluster(text, options)
    given: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, separator, value = option.partition("=")
        if not separator or key not in {*_OPTIONS, *pacing.MECHANISMS}:
            allowed = "mechanism=, threshold=, window=, or threshold/window by mechanism"
            raise InputError(f"policy {text}: unknown option {key}; allowed: {allowed}")
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
    """Settings of one mechanism; name, threshold and window that are not ``given`` come from the default."""
    mechanism = given.get("mechanism") or (default[0] if default else "slack")
    own = STATIC_DEFAULTS.get(mechanism, DEFER_DEFAULT if mechanism == "defer" else (0.0, 0.0))
    known = default[1:] if default and default[0] == mechanism else own
    threshold, window = (
        _ratio(given[key], key, f"policy {text}") if key in given else value
        for key, value in zip(("threshold", "window"), known, strict=True)
    )
    return {mechanism: (threshold, window)}


def _pair(text: str, mechanism: str, value: str) -> tuple[float, float]:
    threshold, separator, window = value.partition("/")
    if not separator:
        raise InputError(f"policy {text}: {mechanism} = {value!r}; allowed: threshold/window, both 0 to 1")
    where = f"policy {text}"
    return _ratio(threshold, f"threshold of {mechanism}", where), _ratio(window, f"window of {mechanism}", where)


def _names_cluster(options: str) -> bool:
    """Whether the text after ``static:`` names a cluster config, not options or a mechanism without its settings."""
    if options.endswith(files.YAML_SUFFIXES):
        return True
    return bool(options) and not {"=", ","} & set(options) and options not in {*_OPTIONS, *pacing.MECHANISMS}


def _static_of_cluster(text: str, cluster: str) -> Static:
    """Fixed settings from section ``pacing`` of a cluster config."""
    try:
        path = files.find("clusters", cluster)
        config = files.read_yaml(path)
    except InputError as error:
        raise InputError(f"policy {text}: {error}") from None
    where, section = f"policy {text}: {path}", config.get("pacing")
    if section is None:
        raise InputError(
            f"{where}: section pacing is missing; add pacing: {{mechanism: ..., threshold: ..., window: ...}}"
        )
    if not isinstance(section, dict):
        raise out_of_range("pacing", section, f"a section with the keys {', '.join(_OPTIONS)}", where)
    for key in section:
        if key not in _OPTIONS:
            raise InputError(f"{where}: unknown key pacing.{key}; allowed: {', '.join(_OPTIONS)}")
    default = pacing.CLUSTER_DEFAULT
    mechanism = section.get("mechanism", default[0])
    allowed = (*STATIC_DEFAULTS, "defer")
    if mechanism not in allowed:
        raise out_of_range("pacing.mechanism", mechanism, f"one of {', '.join(allowed)}", where)
    threshold = _ratio(section.get("threshold", default[1]), "pacing.threshold", where)
    window = _ratio(section.get("window", default[2]), "pacing.window", where)
    return Static(
        {mechanism: (threshold, window)}, name=f"static:mechanism={mechanism},threshold={threshold},window={window}"
    )


def _ratio(value: Any, name: str, where: str) -> float:
    """A number from 0 to 1; also as text, because YAML reads 1e-2 as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise out_of_range(name, value, "a number from 0 to 1", where)
    return number


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
            close = difflib.get_close_matches(name.partition(":")[0], known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InputError(f"policy {text}: no such file; allowed: {', '.join(known)} or a {_SUFFIX} file{hint}")
    content = load_policy(path)
    if preference is not None:
        content = dataclasses.replace(content, policy=content.policy.with_preference(preference))
    return path, content


def _parts(text: str) -> tuple[str, float | None]:
    """The name and the preference in ``text``.

    An existing file counts as a file, whatever its name is. Raises InputError for another option or an invalid number.
    """
    name, _, option = text.rpartition(":")
    if not (name == LEARNED or name.endswith(_SUFFIX)) or Path(text).exists():
        return text, None
    key, _, value = option.partition("=")
    if key != "preference":
        raise InputError(f"policy {text}: unknown option {key}; allowed: preference=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"policy {text}: preference = {value!r}; allowed: a number") from None
