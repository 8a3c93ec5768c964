"""The fast engine against the reference on random steps as programs: how far apart their mean steps are.

``python -m benchmarks.programs.program_engines --write`` fills the table of ``docs/evidence/programs-engines.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.programs.random_programs import random_program
from paceenv.core import pacing
from paceenv.sim.cluster.derive import derive
from paceenv.sim.engine.simulator import Simulator, episode_keys
from paceenv.sim.reference import ProgramReference
from paceenv.ui import output
from paceenv.ui.config_files import write_text
from paceenv.ui.output import markdown_table

WITHIN = 0.02
ITERATIONS = 10
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "programs-engines.md"
BEGIN, END = "<!-- begin: python -m benchmarks.programs.program_engines --write -->", "<!-- end -->"


class Compared(NamedTuple):
    """Mean step of the reference over that of the fast engine, less 1."""

    together: float
    """No message before all members are there, as in the fast engine."""
    early: float
    """Pairs exchange what they have, as real ones do; not-a-number where it was not asked for."""


def compared(seed: int, *, with_early: bool = False) -> Compared:
    """One random program in both engines: every third one holds back, every fourth one has a tenant.

    Args:
        seed: of the program and of its noise.
        with_early: whether to run the reference a second time, with early messages.
    """
    config, keys = random_program(seed, tenants=seed % 4 == 1), episode_keys([seed])
    fast = Simulator(derive(config, keys), keys)
    settings = fast.off() if seed % 3 else pacing.one_mechanism("defer", 0.0, 0.1)[None, None]
    fast_s = fast.run(settings, ITERATIONS).mean()

    def error(is_together: bool) -> float:
        slow = ProgramReference(config, seed, is_together=is_together)
        return float(slow.run(settings, ITERATIONS).mean() / fast_s) - 1.0

    return Compared(error(True), error(False) if with_early else np.nan)


def table(found: Sequence[Compared]) -> tuple[list[str], list[list[str]]]:
    """How far apart the engines are."""
    head = ["messages start", "programs", "mean error", "95 % below", f"within {WITHIN:.0%}", "largest"]
    rows = []
    for name, errors in (
        ("when all members are there", [one.together for one in found]),
        ("when both of their ends are there", [one.early for one in found]),
    ):
        size = np.abs(errors)
        largest = errors[int(size.argmax())]
        rows.append(
            [
                name,
                str(len(found)),
                f"{size.mean():.3%}",
                f"{np.quantile(size, 0.95):.2%}",
                f"{np.mean(size < WITHIN):.1%}",
                f"{largest:+.1%}",
            ]
        )
    return head, rows


def main(
    programs: Annotated[int, typer.Option(min=1, help="How many random programs.")] = 300,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first.")] = 0,
    write: Annotated[bool, typer.Option(help="Write the table into docs/evidence/programs-engines.md.")] = False,
) -> None:
    """How far apart the engines are on random programs."""
    columns, rows = table([compared(seed, with_early=True) for seed in range(first, first + programs)])
    output.print_table("Reference over fast engine, mean step", columns, rows)
    if write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        lines = "\n".join(markdown_table(columns, rows))
        write_text(DOCUMENT, f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    typer.run(main)
