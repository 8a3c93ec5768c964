"""Every key of every kind of config file with type, range and default, from the Pydantic models."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from paceenv.live.testbed.testbed_scenario import Scenario
from paceenv.sim.cluster import Cluster
from paceenv.sim.cluster.quantity import Quantity, Within
from paceenv.sim.cluster.workload import Workload
from paceenv.trainers.evaluation.suites import Suite
from paceenv.trainers.sweep.sweep_config import SweepConfig
from paceenv.trainers.training.train_config import TrainConfig
from paceenv.ui.config_files import Config
from site_pages.markdown import plain, table

KINDS: dict[str, tuple[type[Config], str, str]] = {
    "cluster": (Cluster, "configs/clusters", "`paceenv simulate`, `evaluate`, `train`, `whatif`"),
    "workload": (Workload, "configs/workloads", "section `workload` of a cluster"),
    "train": (TrainConfig, "configs/train", "`paceenv train`"),
    "sweep": (SweepConfig, "configs/sweeps", "`paceenv sweep`"),
    "suite": (Suite, "configs/suites", "`paceenv evaluate --suite`"),
    "scenario": (Scenario, "configs/testbed", "`paceenv testbed`"),
}
"""Model, folder and users of each kind of file."""
BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
EVERYWHERE = {"name": "of this config, for tables and files", "description": "free text, not read"}
_QUANTITY = frozenset(typing.get_args(Quantity))
_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "anything"}


@dataclasses.dataclass
class Value:
    """What a key may hold: words for its type, the allowed values, and the sections it opens."""

    words: list[str] = dataclasses.field(default_factory=list)
    allowed: list[str] = dataclasses.field(default_factory=list)
    models: list[type[BaseModel]] = dataclasses.field(default_factory=list)


def _limits(pieces: Iterable[Any]) -> tuple[str, ...]:
    """The allowed values that the pieces of an annotation state."""
    found: list[str] = []
    bounds: dict[str, float] = {}
    for piece in pieces:
        if isinstance(getattr(piece, "func", None), Within):
            found.append(piece.func.allowed)
        bounds |= {name: bound for name in BOUNDS if (bound := getattr(piece, name, None)) is not None}
        for name, words in (("min_length", "at least"), ("max_length", "at most")):
            if (length := getattr(piece, name, None)) is not None:
                found.append(f"{words} {length} {'entry' if length == 1 else 'entries'}")
        if pattern := getattr(piece, "pattern", None):
            found.append(f"matches `{pattern}`")
    if {"ge", "le"} <= bounds.keys():
        return (f"{bounds['ge']:.12g} to {bounds['le']:.12g}", *found)
    return (*(f"{BOUNDS[name]} {bound:.12g}" for name, bound in bounds.items()), *found)


def _read(value: Value, kind: Any, before: str = "") -> Value:
    """Put down what an annotation allows; ``before`` are words for what it is a part of."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        value.allowed += _limits(inner[1:])
        return _read(value, inner[0], before)
    if origin is typing.Literal:
        value.words += [f"{before}these"] if before else []
        value.allowed.append(", ".join(f"`{choice}`" for choice in inner))
    elif origin in (typing.Union, types.UnionType, list, tuple):
        if set(inner) >= _QUANTITY:
            value.words.append("[quantity](#quantities)")
        before += "list of " * (origin in (list, tuple))
        for part in dict.fromkeys(inner):
            if part is not Ellipsis and not (part in _QUANTITY and set(inner) >= _QUANTITY):
                _read(value, part, before)
    elif origin is dict:
        _read(value, inner[1], f"{before}{_NAMES.get(inner[0], 'name')} to ")
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        value.models.append(kind)
        value.words.append(f"{before}section")
    elif dataclasses.is_dataclass(kind):
        value.words.append(f"{before}section")
    elif kind is not type(None):
        value.words.append(before + _NAMES.get(kind, getattr(kind, "__name__", str(kind)).lower()))
    return value


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    if value is None or isinstance(value, BaseModel) or value in ("", [], {}):
        return "" if not isinstance(value, BaseModel) else "its defaults"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(key: str, model: type[BaseModel], value: Value) -> str:
    """What a key means that has no description of its own."""
    if value.models:
        return _first_sentence(value.models[0])
    if key in EVERYWHERE:
        return EVERYWHERE[key]
    return "as the library names it" if model.__module__.endswith(".algorithm_configs") else ""


def _first_sentence(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split()).replace("``", "").rstrip(".")


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], list[Any]]]:
    """Path, model and rows of a model, then of each model below it, every model once."""
    seen: set[type[BaseModel]] = set()
    waiting = [(prefix, model)]
    while waiting:
        path, one = waiting.pop(0)
        if one in seen:
            continue
        seen.add(one)
        rows = []
        for key, field in one.model_fields.items():
            if field.exclude:
                continue
            value = _read(Value(), field.annotation)
            allowed = "; ".join(dict.fromkeys([*_limits(field.metadata), *value.allowed]))
            rows.append((key, value, allowed, _default(field), field.description or _meaning(key, one, value)))
            waiting += [(f"{path}.{key}".strip("."), below) for below in value.models]
        yield path, one, rows


def _linked(value: Value, sections: Mapping[type[BaseModel], str]) -> str:
    """The words for a value; a section of its own is linked."""
    words = " or ".join(dict.fromkeys(value.words))
    if not value.models:
        return words
    anchor = re.sub(r"[^\w -]", "", sections[value.models[0]].lower()).replace(" ", "-")
    return words.replace("section", f"[section](#{anchor})")


def _page(kind: str) -> str:
    model, folder, used = KINDS[kind]
    lines = [f"Files in `{folder}`; used by {used}.", ""]
    found = list(keys(model))
    sections = {one: f"{kind}: {path}" for path, one, _ in found}
    for path, one, rows in found:
        lines += [f"### {sections[one]}", ""] if path else []
        lines += [plain(_first_sentence(one)) + ".", ""]
        shown = [
            (f"`{key}`", _linked(value, sections), allowed, default, plain(meaning))
            for key, value, allowed, default, meaning in rows
        ]
        lines += [*table(("key", "value", "allowed", "default", "meaning"), shown), ""]
    return "\n".join(lines)


MAKERS = {f"{kind}-config": (lambda kind=kind: _page(kind)) for kind in KINDS}
