"""What `paceenv diagnose` says of what others recorded, beside the truth: a part of docs/evidence/reality.md.

`python -m benchmarks.evidence.first_contact --write` reads the data folder (`--data`, or PACEENV_DATA_DIR, or
`../shared/data` beside the checkout), and damages its traces at random, too (benchmarks/evidence/mutated_traces.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks._common import put
from benchmarks.evidence import mutated_traces
from benchmarks.evidence._mlperf import DATA
from paceenv.core.wording import duration, name_ranks
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.answer import MAX_ROWS, Answer, find_answer
from paceenv.importers.inputs import read_inputs
from paceenv.ui import output

COMMAND: Final = "python -m benchmarks.evidence.first_contact --write"
COLUMNS: Final = ("data", "truth", "answer", "right", "CPU seconds")
_CLOSE_S: Final = 1e-3
"""The lateness of the profiled rank must be this near to the truth in every step."""
H100_LATE_S: Final = (9.3e-3, 10.5e-3, 7.6e-3)
"""Lateness of rank 1 in the last three of four steps, from the profiles by hand."""


@dataclass(frozen=True)
class Case:
    """A recording, what is known of it, and whether an answer agrees; ``said`` puts the answer into few words."""

    path: str
    truth: str
    right: Callable[[Answer], bool]
    said: Callable[[Answer], str]


def _causes(found: Answer) -> str:
    assert found.diagnosis is not None
    d = found.diagnosis
    named = ", ".join(f"{c.cause} {c.share:.0%}" for c in d.causes[:2]) or d.verdict.partition(":")[0]
    slowdown = f"slowdown {d.slowdown:.3f}, " if d.slowdown is not None else ""
    return f"{slowdown}{named}"


def _first_cause(*allowed: str) -> Callable[[Answer], bool]:
    return lambda found: bool(found.diagnosis and found.diagnosis.causes and found.diagnosis.causes[0].cause in allowed)


def _slowdown(value: float, cause: str) -> Callable[[Answer], bool]:
    def right(found: Answer) -> bool:
        d = found.diagnosis
        return d is not None and abs((d.slowdown or 0.0) - value) < 0.001 and d.causes[0].cause == cause

    return right


def _profiled(found: Answer) -> bool:
    d = found.diagnosis
    if d is None or d.causes or not d.arrivals.late or not found.late_hosts:
        return False
    late = d.arrivals.late[0]
    near = len(late.late_s) == 3 and all(abs(a - b) < _CLOSE_S for a, b in zip(late.late_s, H100_LATE_S, strict=True))
    return late.rank == 1 and near and found.late_hosts[0].rank == 1 and found.late_hosts[0].reason == "host"


def _late(found: Answer) -> str:
    assert found.diagnosis is not None
    late = found.diagnosis.arrivals.late[0]
    by = ", ".join(duration(s) for s in late.late_s)
    why = f"; its GPU waits for its {found.late_hosts[0].reason}" if found.late_hosts else ""
    return f"{found.diagnosis.verdict.partition(':')[0]}; rank {late.rank} last by {by}{why}"


def _stopped(*ranks: int) -> Callable[[Answer], bool]:
    return lambda found: len(found.hangs) == 1 and set(ranks) == {*found.hangs[0].stopped, *found.hangs[0].blind}


def _stopped_text(found: Answer) -> str:
    hang = found.hangs[0]
    blind = [rank for rank in hang.blind if rank not in hang.stopped]
    return f"{name_ranks(hang.stopped)} stopped" + (f", {name_ranks(blind)} saw no ends" if blind else "")


def _little(found: Answer) -> bool:
    """Megatron on dedicated nodes: what varies is single long steps, nothing that pacing removes."""
    top = found.steps[0].ceiling if found.steps else None
    return top is not None and top.gain.value - top.from_outliers < 0.01


def _ceiling(found: Answer) -> str:
    steps = found.steps[0]
    top = steps.ceiling
    if top is None:
        return steps.verdict
    return f"at most {top.gain.value:.1%} to win, {top.from_outliers:.1%} of it single long steps"


def _too_few(found: Answer) -> bool:
    return bool(found.steps) and found.steps[0].ceiling is None


_UNEQUAL = ("a pair with more work, a shared uplink", _first_cause(names.SLOW_RANK, names.CONTENTION), _causes)
_STEADY = ("steady but for single steps", _little, _ceiling)
CASES: Final = (
    Case("bytedance-straggler/trace-AR.parquet", "1.973, a slow worker", _slowdown(1.973, names.SLOW_RANK), _causes),
    Case("bytedance-straggler/trace-SE.parquet", "1.537, uneven sequences", _slowdown(1.537, names.DATA), _causes),
    Case("modded-nanogpt-8xh100", "rank 1 last by 9.3, 10.5, 7.6 ms: its host", _profiled, _late),
    Case("nvrx-flight-recorder/gpu_error_1st", "ranks 12 and later 14 hit", _stopped(12, 14), _stopped_text),
    Case("nvrx-flight-recorder/lock_gil_2nd", "ranks 10 and 15 hit", _stopped(10, 15), _stopped_text),
    Case("socket-runs/my-slack-static.parquet", *_UNEQUAL),
    Case("socket-runs/my-slack-adaptive.parquet", *_UNEQUAL),
    Case("socket-runs/my-slack-learned.parquet", *_UNEQUAL),
    Case("socket-runs/my-slack-learned-active.parquet", *_UNEQUAL),
    Case("socket-runs/incast-shallow-learned.parquet", "incast", _first_cause(names.INCAST), _causes),
    Case("socket-runs/two-jobs-learned.parquet", "another job on the uplink", _first_cause(names.TENANT), _causes),
    Case("jean-zay/meg_gpt2_base_n4_dp1_tp4_pp4-1809579.out", *_STEADY),
    Case("jean-zay/meg_gpt2_base_n8_dp1_tp4_pp8-1809562.out", *_STEADY),
    Case("jean-zay/meg_gpt2_base_n16_dp1_tp4_pp16-1809577.out", "nine values, too few", _too_few, _ceiling),
)


def table(data: Path) -> list[tuple[str, ...]]:
    """A row for each recording: truth, answer, right or wrong, CPU seconds."""
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        if not (data / case.path).exists():
            continue
        begin_s = time.process_time()
        found = find_answer(read_inputs([data / case.path], max_rows=MAX_ROWS))
        took_s = time.process_time() - begin_s
        right = "yes" if case.right(found) else "**no**"
        rows.append((case.path, case.truth, case.said(found), right, f"{took_s:.1f}"))
    return rows


def lines(rows: list[tuple[str, ...]], damaged: list[mutated_traces.Answer]) -> list[str]:
    """What the page says: answers on recordings, and on damaged ones."""
    kinds = (mutated_traces.RIGHT, mutated_traces.OPEN, mutated_traces.REFUSED, mutated_traces.WRONG)
    counts = ", ".join(f"{sum(one.kind == kind for one in damaged)} {kind}" for kind in kinds)
    wrong = [f"- {one.source} with {', '.join(one.damage)}: {one.said}" for one in damaged if one.kind == kinds[-1]]
    said = f"Of {len(damaged)} of the traces damaged at random (steps, ranks, rows, groups or names lost, clocks off): "
    return [*output.markdown_table(COLUMNS, rows), "", f"{said}{counts}.", *wrong]


def main(
    data: Annotated[Path, typer.Option(help="The folder with the recordings.")] = DATA,
    damaged: Annotated[int, typer.Option(min=0, help="Damaged traces.")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Rebuild that part of the page.")] = False,
) -> None:
    """Hold answers on recordings of others against the truth."""
    rows = table(data)
    output.print_table("First contact", COLUMNS, rows)
    with output.progress("damaged traces", max(damaged, 1)) as done:
        found = mutated_traces.answers(data, damaged, seed, done) if damaged else []
    wrong = sum(one.kind == mutated_traces.WRONG for one in found)
    output.say(f"{len(found)} damaged traces, {wrong} answers wrong")
    if write:
        put("reality.md", COMMAND, lines(rows, found))


if __name__ == "__main__":
    typer.run(main)
