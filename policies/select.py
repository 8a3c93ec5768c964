"""Policies by name or by file, as commands and suites spell them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from paceenv import configs
from paceenv.cluster import Cluster
from paceenv.errors import InputError
from policies.base import Policy
from policies.clairvoyant import Clairvoyant
from policies.file import load_policy
from policies.rules import Adaptive, Static, paper, passive

NAMES = ("passive", "static", "paper", "adaptive", "clairvoyant")
POLICY_HELP = (
    "passive, static, paper, adaptive, clairvoyant (a bound: it looks ahead), or a policy file. "
    "static takes options: static:threshold=0.05,window=0.2,mechanism=slide"
)


def select_policy(text: str, cluster: Cluster) -> Policy | Clairvoyant:
    """The policy that ``text`` names; ``static`` takes what it is not told from the cluster config."""
    name, _, options = text.partition(":")
    if name == "static":
        return _static(text, options, cluster)
    made: dict[str, Callable[[], Policy | Clairvoyant]] = {
        "passive": passive,
        "paper": paper,
        "adaptive": Adaptive,
        "clairvoyant": Clairvoyant,
    }
    if text in made:
        return made[text]()
    if Path(text).suffix == ".safetensors" or Path(text).exists():
        return load_policy(text).policy
    close = difflib.get_close_matches(text, NAMES, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InputError(f"policy {text}: no such file; allowed: {', '.join(NAMES)} or a .safetensors file{hint}")


def _static(text: str, options: str, cluster: Cluster) -> Static:
    setting = {
        "mechanism": cluster.pacing.mechanism,
        "threshold": cluster.pacing.threshold,
        "window": cluster.pacing.window,
    }
    given: dict[str, object] = {}
    for option in filter(None, options.split(",")):
        configs.set_value(given, option)
    for key, value in given.items():
        if key not in setting:
            raise InputError(f"policy {text}: unknown option {key}; allowed: {', '.join(setting)}")
        if (key == "mechanism") != isinstance(value, str) or isinstance(value, (bool, dict, list)):
            raise InputError(
                f"policy {text}: {key} = {value!r}; allowed: {'a name' if key == 'mechanism' else '0 to 1'}"
            )
        setting[key] = value  # type: ignore[assignment]
    return Static(str(setting["mechanism"]), float(setting["threshold"]), float(setting["window"]), name=text)
