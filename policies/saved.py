"""Policy files as command lines, suites and a live job name them: a file, ``learned`` or ``hf:owner/name``.

``learned`` is the file released with the package, ``policies/learned.safetensors``. Needs numpy and safetensors.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from paceenv.core.errors import InputError
from paceenv.policies.hub import repository
from paceenv.policies.names import LEARNED, NAMES
from paceenv.policies.policy_file import PolicyFile, load_policy

_SUFFIX = ".safetensors"


def released() -> Path:
    """The path of the released policy, whether it exists or not."""
    return Path(str(importlib.resources.files("paceenv.policies"))) / f"{LEARNED}{_SUFFIX}"


def find(text: str, known: Sequence[str] = NAMES) -> tuple[Path, PolicyFile]:
    """The policy file that ``text`` names, and its content.

    ``text`` is ``learned``, a file or ``hf:owner/name``, also with a preference: ``FILE.safetensors:preference=0.3``.
    ``known`` are the allowed names, for the error message.

    Args:
        text: as a command line spells it.
        known: names of other policies, for the error.

    Raises:
        InputError: for an unknown name, an invalid file, and a preference that the policy does not take.
    """
    name, preference = parts(text)
    if name == LEARNED:
        path = released()
        if not path.is_file():
            raise InputError(f"policy {text}: none is released yet; allowed: a {_SUFFIX} file written by paceenv train")
    elif name.startswith(repository.PREFIX):
        path = repository.fetch(name)
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


def parts(text: str, taking: Sequence[str] = (LEARNED,)) -> tuple[str, float | None]:
    """The name and the preference in ``text``. Policy files and the names in ``taking`` take a preference.

    An existing file counts as a file, whatever its name is. Raises InputError for another option or an invalid number.

    Args:
        text: as a command line spells it.
        taking: names of policies, besides files, that take a preference.
    """
    name, _, option = text.rpartition(":")
    known = name in taking or name.endswith(_SUFFIX) or name.startswith(repository.PREFIX)
    if not known or Path(text).exists():
        return text, None
    key, _, value = option.partition("=")
    if key != "preference":
        raise InputError(f"policy {text}: unknown option {key}; allowed: preference=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError(f"policy {text}: preference = {value!r}; allowed: a number") from None
