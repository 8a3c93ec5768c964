"""Answers as plain data: the one place that makes of them what JSON can hold."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """Lists, mappings, text and finite numbers, made of anything that an answer consists of.

    A data class becomes a mapping: what its ``to_json`` returns, else the attributes that its ``SHOWN`` names, else all
    of its fields. So does a named tuple. Arrays become lists, not-a-number becomes None.
    """
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value):
        names = getattr(value, "SHOWN", None) or [one.name for one in fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return plain(value._asdict()) if hasattr(value, "_asdict") else [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
