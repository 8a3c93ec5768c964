"""Finding, reading and checking YAML configs: a run is a file, or the name of one in ``configs/``.

Everything a user can get wrong here becomes one line with value, allowed range and place (:class:`InputError`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from paceenv.core.errors import InputError, did_you_mean, short_repr
from paceenv.core.files import atomic_write
from paceenv.core.files import find as find
from paceenv.core.files import names as names
from paceenv.core.files import packaged as packaged
from paceenv.core.files import parse_yaml as parse_yaml
from paceenv.core.files import read_yaml as read_yaml

Model = TypeVar("Model", bound=BaseModel)

Mechanism = Literal["slack", "phase_shift", "stagger", "defer", "mean_slack"]
AnyMechanism = Literal[Mechanism, "paper"]
"""The paper's rule included."""
SHOWN_ISSUES = 3
"""Most things wrong in a file that an error tells."""


class Config(BaseModel):
    """Base of every config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def parse(model: type[Model], data: dict[str, Any], where: str) -> Model:
    """Data as a config. Raises InputError with ``where`` and the first thing wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(model, error, where)) from None


def load(model: type[Model], kind: str, name: str | os.PathLike[str], changes: Sequence[str] = ()) -> Model:
    """Read a config by file or name; ``kind`` is the folder of the packaged ones, such as ``clusters``.

    Args:
        changes: ``key=value`` each, of values that differ.
    """
    path = find(kind, name)
    data = read_yaml(path)
    for assignment in changes:
        set_value(data, assignment)
    return parse(model, data, str(path))


def _explain(model: type[BaseModel], error: ValidationError, where: str) -> str:
    """Some things wrong, unknown keys first: they are often why another is missing."""
    issues: dict[tuple[Any, ...], Any] = {}
    for issue in error.errors():
        place = tuple(itertools.takewhile(lambda part: not _is_type_tag(part), issue["loc"]))
        # of a value that fits none of several types, the attempt that got furthest says most
        issues[place] = max(issues.get(place, issue), issue, key=_says)
    found = sorted(issues.values(), key=lambda issue: issue["type"] != "extra_forbidden")
    more = f" (and {len(found) - SHOWN_ISSUES} more)" if len(found) > SHOWN_ISSUES else ""
    return f"{where}: {'; also: '.join(_issue(model, issue) for issue in found[:SHOWN_ISSUES])}{more}"


def _says(issue: Any) -> tuple[bool, int]:
    return issue["type"] not in {"model_type", "float_type", "dict_type"}, len(issue["loc"])


def _issue(model: type[BaseModel], issue: Any) -> str:
    place = ".".join(str(part) for part in issue["loc"] if not _is_type_tag(part))
    if issue["type"] == "extra_forbidden":
        known = _keys(model, issue["loc"][:-1])
        hint = did_you_mean(str(issue["loc"][-1]), known) or f"; known keys: {', '.join(known)}"
        return f"unknown key {place} = {short_repr(issue['input'])}{hint}"
    if issue["type"] == "missing":
        return f"{place} is missing"
    message = str(issue["msg"]).removeprefix("Value error, ")
    if "allowed: " in message:  # which says itself what of
        return message
    if issue["type"] == "value_error" and isinstance(issue["input"], dict) and len(issue["input"]) > 1:
        # about several keys
        return f"allowed: {f'{place}: ' if place else ''}{message}"
    return f"{place} = {short_repr(issue['input'])}; allowed: {message[:1].lower()}{message[1:]}"


def _is_type_tag(part: Any) -> bool:
    """Whether a location part is Pydantic's name for a type it tried, not a key of the file."""
    return isinstance(part, str) and (
        part in {"float", "constrained-float", "int", "str", "bool"} or part[:1].isupper() or "[" in part
    )


def _keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    fields = model.model_fields
    for part in location:
        if part in fields:
            annotation = fields[part].annotation
            candidates = [annotation, *getattr(annotation, "__args__", ())]
            nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
            if nested:
                fields = nested[0].model_fields
    return list(fields)


def set_value(data: dict[str, Any], assignment: str, option: str = "--set") -> None:
    """Apply one ``key.sub=value`` to a config's data; list entries go by number. Raises InputError."""
    where, (key, separator, text) = f"{option} {assignment}", assignment.partition("=")
    if not separator or not key:
        raise InputError(f"{where}: expected key=value, for example noise.jitter_cv=0.02")
    node: Any = data
    *parents, last = key.split(".")
    for part in parents:
        node = node[_position(node, part, where)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, (dict, list)):
            raise InputError(f"{where}: {part} holds a value, not a section")
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", error)
        raise InputError(f"{where}: {short_repr(text)} is not a YAML value: {problem}") from None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 1e9 as a string
    node[_position(node, last, where) if isinstance(node, list) else last] = value


def _position(node: list[Any], part: str, where: str) -> int:
    if not (part.isascii() and part.isdecimal()) or int(part) >= len(node):
        raise InputError(f"{where}: {part} is not one of the entries 0 to {len(node) - 1}")
    return int(part)


def write_yaml(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    atomic_write(path, yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True))
