"""What people post, in one table: small inputs of each kind, the answer, and whether it is the right one.

``python -m benchmarks.evidence.small_cases --write`` makes a part of docs/evidence/reality.md; the data are
``small-cases`` in ``--data``, PACEENV_DATA_DIR or ``../shared/data`` beside the checkout.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks._common import put
from benchmarks.evidence._lateness_jobs import DATA
from paceenv.cli import application
from paceenv.ui import output

CASES: Final[dict[str, tuple[str, ...]]] = {
    "19-level-late.csv": ("take 2 times as long since step 120", "150 ms before, 300 ms"),
    "19-level-megatron.log": ("since step 90", "3 s before, 5.6"),
    "19-growth.log": ("grow steadily from 39", "not ranks"),
    "15-rank-column.csv": ("rank 1 takes 3.2 s, the others 2.15 s, in every step",),
    "07-steps-then-hang.log": (
        "rank 0 in ALLREDUCE 1516 (25427968 elements); rank 1 in ALLREDUCE 1517 (1 element)", "SIGABRT", "is 300",
    ),
    "06-watchdog.log": ("ranks 0, 4 stopped", "broadcast 78 of default_pg", "1-3,5-7", "_all_gather_cpu_bytes"),
    "17-ras.txt": ("rank 21 (node 172.16.64.213, GPU 5) does not answer",),
    "02-two-runs": ("2 different runs, 34.0 h apart, not one job", "8 ranks: 30.4 ms", "2 ranks: 64.4 ms"),
    "34-one-rank": ("4 ms in collectives with nothing else to do", "cannot be told apart with one rank"),
    "08-cliff.txt": ("falls from 29.5 GB/s up to 32 MiB to 4.09 to 5.31 GB/s from 64 MiB on",),
    "24-socket-instead-of-ib.log": ("used NET/Socket on eth0", "NET/IB : No device found"),
    "12-openclip.log": ("'data' takes", "makes 97% of the variation"),
    "16-litgpt.log": ("every second step takes 204 ms, the others 92.8 ms",),
    "22-mmengine.log": ("'data time' takes",),
    "23-nanotron.log": ("11.5 s, 11.5 s",),
    "26-deepspeed-phases.log": ("backward allreduce", "forward"),
    "28-detectron2.log": ("part 'data time'",),
    "13-rank-in-the-tag.log": ("ranks, slowest first", "part 'backward'"),
    "43-one-step": ("rank 3 arrives last in 1 of 1 steps, by 7.6 ms", "one step does not show whether it lasts"),
}  # fmt: skip
"""Each input, and what its answer must say."""


def answer_of(path: Path) -> str:
    """All that ``paceenv diagnose`` says of a path, in one line."""
    said, notes = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(notes):
        application.run(["diagnose", str(path), "--no-simulate", "--json", "-"])
        application.run(["diagnose", str(path), "--no-simulate"])
    text = f"{notes.getvalue()} {said.getvalue()}"
    return " ".join(text.replace("│", " ").replace("Rank", "rank").replace("Steps", "steps").split())


def main(
    data: Annotated[Path, typer.Option(help="The folder of data that others recorded.")] = DATA,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/reality.md from this run.")] = False,
) -> None:
    """Print the table."""
    rows = []
    for name, expected in CASES.items():
        said = answer_of(data / "small-cases" / name)
        missing = [one for one in expected if one not in said]
        rows.append((name, "; ".join(expected), "right" if not missing else f"wrong: no {missing[0]!r}"))
    lines = output.markdown_table(("input", "the answer says", ""), rows)
    typer.echo("\n".join(lines))
    if write:
        put("reality.md", "python -m benchmarks.evidence.small_cases --write", lines)


if __name__ == "__main__":
    typer.run(main)
