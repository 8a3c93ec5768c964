"""What PyTorch, NCCL and other backends call collectives, and how large an element is."""

from __future__ import annotations

import re
from typing import Any, Final, TypeGuard

ITEM_BYTES: Final = {
    **dict.fromkeys(("Float", "Int", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
SEND_RECV: Final = "send_recv"
"""A kernel of NCCL that sends or receives, or does both as part of an all-to-all."""
_OPS: Final = (
    ("allreduce", "all_reduce"), ("reducescatter", "reduce_scatter"), ("allgather", "all_gather"),
    ("alltoall", "all_to_all"), ("barrier", "barrier"), ("broadcast", "broadcast"), ("gather", "gather"),
    ("scatter", "scatter"), ("sendrecv", SEND_RECV), ("isendirecv", SEND_RECV), ("send", "send"), ("recv", "recv"),
    ("reduce", "reduce"),
)  # fmt: skip
POINT_TO_POINT: Final = ("send", "recv", SEND_RECV)
_KERNEL: Final = re.compile(r"nccl|rccl", re.IGNORECASE)


def op_name(said: str) -> str:
    """The trace's name of a collective that PyTorch or NCCL calls ``said``; "collective" if unknown."""
    plain = re.sub(r"[^a-z0-9]", "", said.lower())
    return next((op for known, op in _OPS if known in plain), "collective")


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel is one of NCCL or RCCL, by its name."""
    return _KERNEL.search(name) is not None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a finite number of a size that times have."""
    return type(value) in (int, float) and abs(value) < 1e19
