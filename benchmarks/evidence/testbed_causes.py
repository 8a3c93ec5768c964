"""Whether `paceenv diagnose` names the cause that was put there: real jobs on the testbed, over real sockets.

`python -m benchmarks.evidence.testbed_causes --write` puts the table into docs/evidence/causes.md. Takes root, and an
hour of a machine with nothing else to do. A real host adds causes of its own. A cause that was not put there is an
error only if it is named before the right one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import typer

from benchmarks._common import machine
from benchmarks.evidence._processors import Processors, stolen
from benchmarks.evidence.simulated_causes import HEALTHY
from paceenv.core.trace import read_trace
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.diagnose import Diagnosis, diagnose_matrix
from paceenv.diagnosis.operation_matrix import OperationMatrix, read_matrix
from paceenv.live.testbed.testbed_run import agent_options, run_scenario
from paceenv.live.testbed.testbed_scenario import Scenario, load_scenario
from paceenv.ui import config_files, output
from paceenv.ui.output import markdown_table

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "causes.md"
MARK: Final = "## Causes put into real jobs"
"""Heading of the section that this script writes."""
ITERATIONS: Final = 120
WITHIN: Final = 0.1
"""Share of the step: allowed error of the cost of a cause."""
LONGER: Final = 2
SOUND_RUNS: Final = 3
"""Runs of a job without causes, as several jobs are compared with it."""
FIRST: Final = 5
"""Iterations in which a job still warms up."""


@dataclass(frozen=True)
class Case:
    """A scenario of the testbed with changes, the causes of which the largest must come first, and how to undo them."""

    label: str
    scenario: str
    changes: tuple[str, ...]
    causes: tuple[str, ...] = ()
    put: tuple[str, ...] = ()

    def load(self, *, sound: bool = False) -> Scenario:
        """The job; ``sound``: without what was put there."""
        data = load_scenario(self.scenario).model_dump(exclude_unset=True)
        for change in (*self.changes, *(() if sound else self.put)):
            config_files.set_value(data, change)
        return config_files.parse(Scenario, data, self.label)


def _iteration(checkpoint: dict[str, Any] | None = None, **compute: Any) -> str:
    phases = [{"compute": {"mean_s": 0.12, "jitter_cv": 0.002} | compute}, {"all_reduce": {"bytes": 1e5}}]
    return f"jobs.0.iteration={json.dumps(phases + ([{'checkpoint': checkpoint}] if checkpoint else []))}"


def _plain(label: str, *causes: str, checkpoint: dict[str, Any] | None = None, **compute: Any) -> Case:
    """Eight hosts on one switch, 120 ms of compute and a small all-reduce."""
    put = (_iteration(checkpoint, **compute),) if causes else ()
    return Case(label, "null-jitter", (_iteration(),), causes, put)


def _pairs(label: str, *causes: str, slow: dict[str, Any] | None = None, **network: Any) -> Case:
    """Four pairs across two racks, with as much uplink as they want; links slow enough for the machine's cores."""
    changes = ["network.host_mbps=80", "network.uplink_mbps=1600", "jobs.0.iteration.0.compute.mean_s=0.12"]
    put = [f"network.{key}={json.dumps(value)}" for key, value in network.items()]
    put += [f"jobs.0.iteration.0.compute.slow={json.dumps(slow)}"] if slow else []
    return Case(label, "equal-slack", tuple(changes), causes, tuple(put))


def _tenant(label: str, megabytes: float) -> Case:
    """A job that shares its uplink with another of the same period."""
    changes = [f"jobs.0.iteration.1.all_reduce.bytes={size}" for size in (4, megabytes * 1e6)]
    return Case(label, "two-jobs", (changes[0],), (names.TENANT,), (changes[1],))


def _slow(factor: float) -> dict[str, Any]:
    return {"ranks": [3], "factor": factor}


_STALLS: Final[dict[str, Any]] = {"stall_rate": 0.01, "stall_mean_s": 0.5}
_EPISODES: Final[dict[str, int]] = {"every": 60, "iterations": 25, "first": 10}
_WRITES: Final[dict[str, Any]] = {"every": 15, "seconds": 0.8, "ranks": [0]}
CASES: Final = (
    _plain("nothing"),
    _plain("jitter of 5 %", names.AMPLIFICATION, jitter_cv=0.05),
    _plain("jitter of 15 %", names.AMPLIFICATION, jitter_cv=0.15),
    _plain("jitter of 25 %", names.AMPLIFICATION, jitter_cv=0.25),
    _plain("unequal data, 10 %", names.DATA, imbalance_cv=0.1),
    _plain("unequal data, 25 %", names.DATA, imbalance_cv=0.25),
    _plain("a rank slower by 15 %", names.SLOW_RANK, slow=_slow(1.15)),
    _plain("a rank slower by 40 %", names.SLOW_RANK, slow=_slow(1.4)),
    _plain("the same, and jitter of 10 %", names.SLOW_RANK, names.AMPLIFICATION, slow=_slow(1.4), jitter_cv=0.1),
    _plain("episodes at half the speed", names.FAIL_SLOW, slow=_slow(2.0) | _EPISODES),
    _plain("episodes slower by half", names.FAIL_SLOW, slow=_slow(1.5) | _EPISODES),
    _plain("drift of 10 %", names.DRIFT, drift_cv=0.1, drift_iterations=15),
    _plain("stalls of half a second", names.STALLS, **_STALLS),
    _plain("the same, a rank slower by 20 %", names.STALLS, names.SLOW_RANK, slow=_slow(1.2), **_STALLS),
    _plain("checkpoints of one rank", names.CHECKPOINT, checkpoint=_WRITES),
    _plain("the same, a rank slower by 20 %", names.CHECKPOINT, names.SLOW_RANK, checkpoint=_WRITES, slow=_slow(1.2)),
    _pairs("nothing, four pairs"),
    _pairs("four pairs on half the uplink they want", names.CONTENTION, uplink_mbps=160),
    _pairs("four pairs on a third of it", names.CONTENTION, uplink_mbps=107),
    _pairs("a host's link at half the rate", names.LOCALITY, host_mbps_of={4: 40}),
    _pairs("the same, a rank slower by 40 %", names.LOCALITY, names.SLOW_RANK, host_mbps_of={4: 40}, slow=_slow(1.4)),
    _tenant("another job on the uplink", 1.6),
    _tenant("another job that transfers half as much", 0.8),
    Case("a gather through 256 KB", "incast-deep", ()),
    Case("a gather through 32 KB", "incast-deep", (), (names.INCAST,), ("network.host_buffer_kb=32",)),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a run's diagnosis named, and what was put there, as shares of the step; what was stolen, of the time."""

    case: Case
    diagnosis: Diagnosis
    step_cv: float
    put: float
    stolen: float

    @property
    def named(self) -> dict[str, float]:
        return {c.cause: c.lost_s / self.diagnosis.step_time_s for c in self.diagnosis.causes}

    @property
    def right(self) -> bool:
        """The first cause is one that was put there, or there is none and none was."""
        first = next(iter(self.named), None)
        return first in self.case.causes if self.case.causes else first is None

    @property
    def error(self) -> float:
        """How far off the share of the step is that goes to what was put there."""
        return abs(sum(self.named.get(cause, 0.0) for cause in self.case.causes) - self.put)

    def as_dict(self) -> dict[str, Any]:
        told = {"case": self.case.label, "causes": list(self.case.causes), "put": self.put, "found": self.named}
        told |= {"right": self.right, "step_time_s": self.diagnosis.step_time_s, "step_cv": self.step_cv}
        told |= {"stolen": self.stolen}
        return told | {"verdict": self.diagnosis.verdict}


def observed(scenario: Scenario, iterations: int, folder: Path, *, runs: int = 1) -> tuple[OperationMatrix, float]:
    """Run a scenario with the agent watching its job; the matrix of its trace, and the share of processor time stolen.

    A stretch that loses processor time to a hypervisor does not show the job. So the scenario makes LONGER times as
    many iterations, and the stretch that lost least counts, whatever it shows.

    Args:
        scenario: what to run.
        iterations: length of the stretch that counts.
        folder: where runs are kept.
        runs: number of runs to choose from.
    """
    agents = {scenario.loop.job: agent_options(scenario.loop, "observe")}
    made = LONGER * iterations + FIRST
    name = hashlib.sha256(f"{scenario.model_dump_json()} {made}".encode()).hexdigest()[:16]
    found = []
    for i in range(runs):
        place = folder / f"{name}-{i}"
        noted, job = place / "processors.npy", place / scenario.loop.job
        if not noted.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a run that was cut
            with Processors() as processors:
                run_scenario(scenario, place, agents=agents, iterations=made)
            processors.save(noted)
        end_s_T = np.load(job / "steps.npy", allow_pickle=False).max(axis=1)
        stolen_W = stolen(noted, end_s_T[FIRST - 1 : -iterations], end_s_T[FIRST - 1 + iterations :])
        found.append((float(stolen_W.min()), FIRST + int(np.argmin(stolen_W)), job / "trace.parquet"))
    share, first, path = min(found)
    trace = read_trace(path)
    counts = (trace.column("iteration") >= first) & (trace.column("iteration") < first + iterations)
    return read_matrix(replace(trace, table=trace.table.filter(pa.array(counts)).combine_chunks())), share


def run_cases(cases: Sequence[Case], iterations: int, folder: Path) -> Iterator[Found]:
    """Every case, compared with the same job without its causes.

    Args:
        cases: what to run.
        iterations: iterations that count.
        folder: where runs are kept.
    """
    for case in cases:
        sound, share = observed(case.load(sound=True), iterations, folder, runs=SOUND_RUNS)
        matrix = sound
        if case.put:
            matrix, share = observed(case.load(), iterations, folder)
        mean_s = float(matrix.step_s_T.mean())
        put = 1.0 - float(sound.step_s_T.mean()) / mean_s
        yield Found(case, diagnose_matrix(matrix), float(matrix.step_s_T.std()) / mean_s, put, share)


def _row(one: Found) -> tuple[str, ...]:
    named = ", ".join(f"{cause} {share:.0%}" for cause, share in one.named.items()) or HEALTHY
    put = f"{' and '.join(one.case.causes)} {one.put:.0%}" if one.case.causes else HEALTHY
    step = f"{one.diagnosis.step_time_s * 1e3:.0f} ms, CV {one.step_cv:.2f}"
    return one.case.label, step, f"{one.stolen:.1%}", put, named, "right" if one.right else "**wrong**"


def section(found: list[Found], iterations: int) -> list[str]:
    """The part of the document that is measured here."""
    sick, sound = [one for one in found if one.case.causes], [one for one in found if not one.case.causes]
    summary = [
        ("first cause named is one that was put there", f"{sum(one.right for one in sick)} of {len(sick)}"),
        (f"its cost within {100 * WITHIN:.0f} points", f"{sum(one.error <= WITHIN for one in sick)} of {len(sick)}"),
        ("jobs without a cause that got one", f"{sum(not one.right for one in sound)} of {len(sound)}"),
    ]
    lines = [
        MARK,
        "",
        "`python -m benchmarks.evidence.testbed_causes` runs torchrun jobs over real sockets between namespaces, "
        f"{iterations} iterations each; the live agent writes their traces.",
        "Percentages are of the step. The cost of what was put there is the difference to the step of the same job "
        "without it.",
        f"*Stolen* is the share of processor time that a hypervisor took: each job ran {LONGER} times as long, those "
        f"without causes {SOUND_RUNS} times, and the stretch that lost least counts.",
        "",
        *markdown_table(("result", ""), summary),
        "",
        *markdown_table(("job", "step", "stolen", "put there", "named", ""), [_row(one) for one in found]),
    ]
    return [*lines, "", *markdown_table(("", ""), list(machine().items())), ""]


def write(found: list[Found], iterations: int) -> None:
    """Put the section into the document, in place of the one that is there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(f"{MARK}\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    text = before if rest else before.rstrip("\n") + "\n\n"
    config_files.write_text(DOCUMENT, (text + "\n".join(section(found, iterations)) + ("\n" + after if after else "")))


def main(
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
    document: Annotated[bool, typer.Option("--write", help="Put the table into docs/evidence/causes.md.")] = False,
    only: Annotated[str, typer.Option(help="Only cases whose label has this text in it.")] = "",
    iterations: Annotated[int, typer.Option(min=20, help="Of every job that count.")] = ITERATIONS,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the runs in this folder, and use those that are there.")
    ] = None,
) -> None:
    """Run jobs with known causes on the testbed and say which causes their traces are diagnosed with."""
    cases, found = [case for case in CASES if only in case.label], []
    with tempfile.TemporaryDirectory() as folder, output.progress("causes on the testbed", len(cases)) as done:
        for one in run_cases(cases, iterations, keep or Path(folder)):
            found.append(one)
            output.say("; ".join(_row(one)))
            done(len(found))
    if json_ is not None:
        output.write_json([one.as_dict() for one in found], json_)
    if json_ != "-":
        print("\n".join(section(found, iterations)))
    if document:
        write(found, iterations)


if __name__ == "__main__":
    typer.run(main)
