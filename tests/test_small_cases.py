"""What people post: small inputs with their right answers, and 300 made logs of which none is answered wrong."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from traced_jobs import SMALL_CASES_DIR, needs_small_cases

from paceenv.cli import application
from paceenv.diagnosis.step_times.step_diagnosis import diagnose_steps
from paceenv.importers.step_log import read_step_log

COLUMNS = (
    "step_time", "iter_time", "iteration_time", "time_per_step", "batch_time", "train_step_time", "perf/step_time",
    "sec_per_iter", "time/step", "elapsed_time_per_iteration",
)  # fmt: skip
STEPS = ("step", "iteration", "iter", "global_step", "batch")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
TAGS = ("", "[rank0]: ", "0: ", "[default0]:", "[1,0]<stdout>:")

Array = NDArray[np.float64]


CASES: dict[str, tuple[str, ...]] = {
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
    "12-openclip.log": ("'data' takes 61% of all time", "makes 97% of the variation", "'data' 5.8 s 61% of all time"),
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


@needs_small_cases
@pytest.mark.parametrize("name", CASES)
def test_a_small_case_is_answered_right(name: str) -> None:
    said = answer_of(SMALL_CASES_DIR / name)
    for expected in CASES[name]:
        assert expected in said, said


def course(random: np.random.Generator, kind: str, n: int) -> tuple[Array, list[float], list[int]]:
    """Step times of a kind, with its levels, or the ends of its growth, and where levels change, or the period."""
    at = np.arange(n)
    if kind == "levels":
        many, scale = int(random.integers(2, 4)), random.choice([1.3, 1.6, 2.0, 3.0])
        cuts = [int(n * share) for share in np.sort([random.uniform(0.22, 0.4), random.uniform(0.6, 0.78)])[: many - 1]]
        levels = list(random.permutation([1.0, scale, scale**2][:many]))
        return np.array(levels)[np.searchsorted(cuts, at, side="right")], levels, cuts
    if kind == "growth":
        ends = [1.0, float(random.choice([1.5, 3.0, 6.0]))]
        return np.linspace(*ends, n), ends, []
    if kind == "alternation":
        period, factor = int(random.choice([2, 4] if n >= 40 else [2])), float(random.choice([1.5, 2.2, 4.0]))
        return np.where(at % period == period - 1, factor, 1.0), [1.0, factor], [period]
    if kind == "long steps" and n >= 200:
        period = int(random.choice([20, 50]))
        return np.where(at % period == period - 1, 5.0, 1.0), [1.0, 5.0], [period]
    return np.ones(n), [1.0], []


def written(random: np.random.Generator, step_s: Array) -> str:
    """Step times as some program writes them."""
    column, step, unit = (str(random.choice(names)) for names in (COLUMNS, STEPS, list(UNITS)))
    values = [f"{x / UNITS[unit]:.6g}" for x in step_s]
    style, tag = random.integers(5), str(random.choice(TAGS))
    if style == 0:
        return f"{step},loss,{column}_{unit}\n" + "".join(f"{i},2.5,{x}\n" for i, x in enumerate(values))
    lines = {
        1: lambda i, x: json.dumps({step: i, "loss": 2.5, f"{column}_{unit}": float(x)}),
        2: lambda i, x: f"{step}: {i} | loss: 2.5 | {column}: {x} {unit} | lr: 1e-4",
        3: lambda i, x: f"{step}={i} loss=2.5 {column}={x}{unit} lr=0.0001",
        4: lambda i, x: f" {step} {i:8d}/ 100000 | {column.replace('_', ' ')} ({unit}): {x} | lm loss: 2.1E+00 |",
    }[int(style)]
    return "".join(f"{tag}{lines(i, x)}\n" for i, x in enumerate(values))


@pytest.mark.slow
def test_of_300_mutated_logs_none_is_answered_wrong(tmp_path: Path) -> None:
    """A finding that is named is the right one, with its numbers; what cannot be told is not named."""
    random, named = np.random.default_rng(7), 0
    for case in range(300):
        kind = str(random.choice(["levels", "growth", "alternation", "long steps", "none"]))
        n = 5000 if case == 0 else int(np.exp(random.uniform(np.log(20), np.log(400))))
        relative, values, marks = course(random, kind, n)
        base_s = 10.0 ** random.uniform(-1.3, 0.8)
        step_s = base_s * relative * (1.0 + 0.012 * random.normal(size=n))
        path = tmp_path / "log"
        path.write_text(written(random, step_s))
        log = read_step_log(path)
        np.testing.assert_allclose(log.step_s_V, step_s, rtol=1e-4)
        found = diagnose_steps(log)
        assert found.ceiling is not None
        assert found.ceiling.high <= found.steady_s_V.mean() / found.steady_s_V.min() - 1.0 + 1e-9
        if not found.findings:
            continue
        named += 1
        about = (case, kind, n, found.findings[0].text)
        assert found.findings[0].kind == kind, about
        if kind == "levels":
            assert [one.level_s / base_s for one in found.ordinary.levels] == pytest.approx(values, rel=0.03), about
            warm = int(found.ordinary.warm_up_V.sum())
            assert [one.start + warm for one in found.ordinary.levels[1:]] == pytest.approx(marks, abs=2), about
        elif kind == "growth":
            assert found.drift is not None
            assert np.array(found.drift.ends_s) / base_s == pytest.approx(values, rel=0.15), about
        else:
            assert found.findings[0].period == marks[0], about
    assert named > 180
