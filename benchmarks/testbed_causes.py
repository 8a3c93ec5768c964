"""Is the cause that `paceenv diagnose` names the one that was put there? Real jobs on the testbed, over real sockets.

`python -m benchmarks.testbed_causes --write` puts the table into docs/diagnosis.md. Takes some ten minutes and root.
What a real host adds (stalls, above all on a busy machine) is really there, so a cause that was not put there and is
named beside the right one is shown, not counted as an error; named before it, it is one.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks._common import machine
from benchmarks.causes import HEALTHY
from live.testbed.run import agent_options, run_scenario
from live.testbed.scenario import Scenario, load_scenario
from paceenv import configs, output
from paceenv.diagnosis import causes as names
from paceenv.diagnosis.diagnose import Diagnosis, diagnose
from paceenv.output import markdown_table
from paceenv.trace import read_trace

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "diagnosis.md"
MARK: Final = "## Causes put into real jobs"
"""Heading of what this script writes, up to the next heading of its rank."""
ITERATIONS: Final = 160


@dataclass(frozen=True)
class Case:
    """A scenario of the testbed with changes, and the causes of which the largest must come first."""

    label: str
    scenario: str
    causes: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def load(self) -> Scenario:
        data = load_scenario(self.scenario).model_dump(exclude_unset=True)
        for change in self.changes:
            configs.set_value(data, change)
        return configs.parse(Scenario, data, self.label)


_COMPUTE: Final = "jobs.0.iteration.0.compute"
CASES: Final = (
    Case("nothing", "null-jitter", (), (f"{_COMPUTE}.jitter_cv=0.002",)),
    Case("jitter of 5 %", "null-jitter", (names.AMPLIFICATION,), (f"{_COMPUTE}.jitter_cv=0.05",)),
    Case("jitter of 15 %", "null-jitter", (names.AMPLIFICATION,)),
    Case("one rank slower by 15 %", "slow-rank", (names.SLOW_RANK,), (f"{_COMPUTE}.slow.factor=1.15",)),
    Case("one rank slower by 40 %", "slow-rank", (names.SLOW_RANK,)),
    Case("a rank slower by 40 %, and jitter of 10 %", "slow-rank", (names.SLOW_RANK, names.AMPLIFICATION),
         (f"{_COMPUTE}.jitter_cv=0.1",)),
    Case("episodes at half the speed", "fail-slow", (names.FAIL_SLOW,)),
    Case("episodes slower by half", "fail-slow", (names.FAIL_SLOW,), (f"{_COMPUTE}.slow.factor=1.5",)),
    Case("four pairs on one uplink", "equal-slack", (names.CONTENTION,)),
    Case("four pairs on one uplink, one of them with work after", "unequal-slack", (names.CONTENTION, names.SLOW_RANK)),
    Case("another job on the uplink", "two-jobs", (names.TENANT,)),
    Case("a gather through 32 KB", "incast-shallow", (names.INCAST,)),
    Case("the same through 256 KB", "incast-deep", ()),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a run's diagnosis named, and whether that is right."""

    case: Case
    diagnosis: Diagnosis
    step_cv: float

    @property
    def right(self) -> bool:
        """The first cause is one that was put there, or there is none and none was."""
        named = [cause.cause for cause in self.diagnosis.causes]
        return not named if not self.case.causes else bool(named) and named[0] in self.case.causes

    def as_dict(self) -> dict[str, Any]:
        named = [{"cause": c.cause, "share": c.share, "lost_s": c.lost_s} for c in self.diagnosis.causes]
        told = {"case": self.case.label, "causes": list(self.case.causes), "found": named, "right": self.right}
        return told | {"step_time_s": self.diagnosis.step_time_s, "verdict": self.diagnosis.verdict}


def run_case(case: Case, iterations: int, folder: Path) -> Found:
    """Run the job with the agent watching, and diagnose its trace."""
    scenario = case.load()
    agents = {scenario.loop.job: agent_options(scenario.loop, "observe")}
    result = run_scenario(scenario, folder, agents=agents, iterations=iterations).jobs[scenario.loop.job]
    assert result.trace is not None, "the agent observes"
    step_s_T = result.step_s_T
    return Found(case, diagnose(read_trace(result.trace)), float(step_s_T.std() / np.mean(step_s_T)))


def section(found: list[Found], iterations: int) -> list[str]:
    """The part of the document that is measured here."""
    rows = []
    for one in found:
        said = [f"{c.cause} {c.lost_s / one.diagnosis.step_time_s:.0%} of the step" for c in one.diagnosis.causes]
        put = " and ".join(one.case.causes) or HEALTHY
        verdict = "right" if one.right else "**wrong**"
        step = f"{one.diagnosis.step_time_s * 1e3:.0f} ms, CV {one.step_cv:.2f}"
        rows.append((one.case.label, put, ", ".join(said) or HEALTHY, verdict, step))
    right = sum(one.right for one in found)
    about = (
        f"`python -m benchmarks.testbed_causes`: torchrun jobs over real sockets between namespaces, {iterations} "
        "iterations each, whose traces the live agent wrote. The first cause named is one that was put there in "
        f"{right} of {len(found)}. Hosts have stalls of their own, which are named where they cost 2 % of a step."
    )
    lines = [MARK, "", about, "", *markdown_table(("put there", "cause", "named", "", "step"), rows)]
    return [*lines, "", *markdown_table(("", ""), list(machine().items())), ""]


def write(found: list[Found], iterations: int) -> None:
    """Put the section into the document, in place of the one that is there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(f"{MARK}\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    text = before if rest else before.rstrip("\n") + "\n\n"
    configs.write_text(DOCUMENT, (text + "\n".join(section(found, iterations)) + ("\n" + after if after else "")))


def main(
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
    document: Annotated[bool, typer.Option("--write", help="Put the table into docs/diagnosis.md.")] = False,
    only: Annotated[str, typer.Option(help="Only cases whose label has this text in it.")] = "",
    iterations: Annotated[int, typer.Option(min=20, help="Of every job.")] = ITERATIONS,
) -> None:
    """Run jobs with known causes on the testbed and say which causes their traces are diagnosed with."""
    cases, found = [case for case in CASES if only in case.label], []
    with tempfile.TemporaryDirectory() as folder, output.progress("causes on the testbed", len(cases)) as done:
        for i, case in enumerate(cases):
            found.append(run_case(case, iterations, Path(folder, str(i))))
            done(i + 1)
    if json_ is not None:
        output.write_json([one.as_dict() for one in found], json_)
    if json_ != "-":
        print("\n".join(section(found, iterations)))
    if document:
        write(found, iterations)


if __name__ == "__main__":
    typer.run(main)
