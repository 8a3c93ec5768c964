"""Tables that the code states beside what they describe: environment, agent's options, trace, policy file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import pyarrow as pa
from safetensors import safe_open

from paceenv import policies
from paceenv.core import trace
from paceenv.envs.pacing_env import PacingEnv
from paceenv.live.options import OPTIONS
from site_pages.markdown import table

LONGEST = 80
"""Characters of a value in a table."""


def _trace_columns() -> str:
    def type_name(kind: pa.DataType) -> str:
        return "text, dictionary-encoded" if kind == pa.dictionary(pa.int32(), pa.string()) else str(kind)

    return "\n".join(table(("column", "type"), [(f"`{field.name}`", type_name(field.type)) for field in trace.SCHEMA]))


def _live_options() -> str:
    rows = []
    for option in OPTIONS:
        means, kind = option.metadata["meaning"], (get_args(option.type) or (option.type,))[0].__name__
        rows.append((f"`{option.name}`", kind, means.unset or f"`{option.default}`", means.allowed, means.help))
    return "\n".join(table(("option", "type", "default", "allowed", "meaning"), rows))


def _operations() -> str:
    kinds = {
        "compute": trace.COMPUTE_OPS,
        "delay of a rank by its own choice": (trace.PACE_OP,),
        "collective": trace.COLLECTIVE_OPS,
        "point to point": trace.POINT_TO_POINT_OPS,
        "other": trace.OTHER_OPS,
    }
    return "\n".join(
        table(("kind", "values of `op`"), [(kind, ", ".join(f"`{op}`" for op in ops)) for kind, ops in kinds.items()])
    )


def _policy_header() -> str:
    """The header of the policy that ships, long values cut."""
    with safe_open(Path(policies.__file__).parent / "learned.safetensors", framework="numpy") as file:
        header = json.loads(file.metadata()["paceenv"])
    values = [(key, json.dumps(value)) for key, value in header.items()]
    rows = [(f"`{key}`", f"`{text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}`") for key, text in values]
    return "\n".join(table(("key", "in the policy that ships"), rows))


MAKERS = {
    "environment": lambda: inspect.getdoc(PacingEnv) or "",
    "live-options": _live_options,
    "policy-header": _policy_header,
    "trace-columns": _trace_columns,
    "trace-operations": _operations,
}
