"""Profiles of a simulated GPU job whose every number is known: hosts launch kernels, devices run them in order.

Times are us. An operation of a step is a kernel (``Kernel``) or a collective (``Meeting``); all ranks run the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

LATENCY_US = 5.0
KERNEL_NAMES = {
    "allreduce": "AllReduce_Sum_bf16_RING_LL",
    "all_to_all": "SendRecv",
    "_allgather_base": "AllGather_RING_LL",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of the compute stream, or a copy to the device; its launch takes the host ``host_us`` in ``range``."""

    took_us: float
    host_us: float = 10.0
    range: str = "aten::mm"
    category: str = "kernel"
    name: str = "sm90_gemm"


@dataclass(frozen=True)
class Meeting:
    """A collective after the compute before it; compute behind it waits for it unless ``beside``."""

    said: str = "allreduce"
    took_us: float = 500.0
    elements: int = 1 << 20
    beside: bool = False


@dataclass
class Job:
    """What is recorded, and of whom.

    ``program`` gives a step's operations; ``host_us`` and ``took_us`` change those of a rank, step and place.
    """

    ranks: int = 3
    steps: Sequence[int] = range(10, 16)
    program: Callable[[int], list[Kernel | Meeting]] = lambda step: [Kernel(4000.0), Meeting(), Kernel(2000.0)]
    host_us: Callable[[int, int, int, float], float] = lambda rank, step, place, us: us
    took_us: Callable[[int, int, int, float], float] = lambda rank, step, place, us: us
    metadata: bool = True
    launches: bool = True
    old_names: bool = False
    clock_us: Sequence[float] = ()
    first_step: dict[int, int] = field(default_factory=dict)
    marks: bool = True


@dataclass
class _Rank:
    host_us: float = 1e6
    compute_us: float = 1e6
    network_us: float = 0.0
    begun_us: float = 0.0
    device_us: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0


def profiles(job: Job) -> list[dict[str, Any]]:
    """A profile per rank; each host may be a step ahead of its device."""
    states = [_Rank() for _ in range(job.ranks)]
    for step in job.steps:
        for state in states:
            state.host_us = max(state.host_us, state.compute_us - 20_000.0)
            state.begun_us, state.device_us = state.host_us, state.compute_us
        for place, op in enumerate(job.program(step)):
            starts = [_launch(job, state, rank, step, place, op) for rank, state in enumerate(states)]
            if isinstance(op, Meeting):
                end_us = max(starts) + op.took_us
                for rank, (state, start_us) in enumerate(zip(states, starts, strict=True)):
                    _run_meeting(job, state, rank, op, start_us, end_us)
        for rank, state in enumerate(states):
            if job.marks and step >= job.first_step.get(rank, 0):
                _add(state, "user_annotation", f"ProfilerStep#{step}", 1, state.begun_us, state.host_us)
                if not job.launches:
                    _add(state, "gpu_user_annotation", f"ProfilerStep#{step}", 9, state.device_us, state.compute_us)
    return [_profile(job, rank, state) for rank, state in enumerate(states)]


def _launch(job: Job, state: _Rank, rank: int, step: int, place: int, op: Kernel | Meeting) -> float:
    """The host's part, and a kernel's; when the operation begins on the device."""
    state.calls += 1
    host_us = job.host_us(rank, step, place, op.host_us if isinstance(op, Kernel) else 20.0)
    begin_us = state.host_us
    launched_us = begin_us + 0.8 * host_us
    state.host_us = begin_us + host_us
    if isinstance(op, Kernel):
        _add(state, "cpu_op", op.range, 1, begin_us, state.host_us)
    else:
        _add(state, "cpu_op", "record_param_comms", 1, begin_us, state.host_us)
    if job.launches:
        call = {"correlation": state.calls}
        _add(state, "cuda_runtime", "cudaLaunchKernel", 1, launched_us, state.host_us - 2, **call)
    ready_us = launched_us + LATENCY_US
    if isinstance(op, Meeting):
        return max(ready_us, state.compute_us, state.network_us)
    start_us = max(ready_us, state.compute_us)
    state.compute_us = start_us + job.took_us(rank, step, place, op.took_us)
    told = {"correlation": state.calls} if job.launches else {}
    _add(state, op.category, op.name, 7, start_us, state.compute_us, **told)
    return start_us


def _run_meeting(job: Job, state: _Rank, rank: int, op: Meeting, start_us: float, end_us: float) -> None:
    name = KERNEL_NAMES[op.said]
    name = f"ncclKernel_{name}" if job.old_names else f"ncclDevKernel_{name}"
    told: dict[str, Any] = {"correlation": state.calls} if job.launches else {}
    if job.metadata:
        told |= {
            "Collective name": op.said,
            "In msg nelems": op.elements,
            "Out msg nelems": op.elements * (job.ranks if op.said == "_allgather_base" else 1),
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(job.ranks))),
        }
    _add(state, "kernel", name, 20 + rank, start_us, end_us, **told)
    state.network_us = end_us
    if not op.beside:
        state.compute_us = max(state.compute_us, end_us)


def _add(state: _Rank, category: str, name: str, tid: int, start_us: float, end_us: float, **told: Any) -> None:
    pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 100
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    state.events.append(event | {"ts": start_us, "dur": max(end_us - start_us, 0.0), "args": told})


def _profile(job: Job, rank: int, state: _Rank) -> dict[str, Any]:
    add_us = job.clock_us[rank] if job.clock_us else 0.0
    events = [event | {"ts": event["ts"] + add_us} for event in state.events]
    about = {"backend": "nccl", "rank": rank, "world_size": job.ranks}
    return {"schemaVersion": 1, "distributedInfo": about, "traceEvents": events}
