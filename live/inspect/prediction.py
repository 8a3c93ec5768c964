"""What a policy would gain on a watched job: simulated on the cluster that the run's trace calibrates to.

Made on a machine with the simulator (``paceenv live predict``), never in the job; kept as
``DIR/<attempt>/prediction.json``, which status and summary show on any machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceenv.core.errors import InputError, needs
from paceenv.core.files import atomic_write, open_regular
from paceenv.live.decide.live_policy import SEPARATOR
from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.snapshot import Snapshot, entry, finite, number, text

SCHEMA: Final = "paceenv.prediction/1"
FILE: Final = "prediction.json"
MAX_BYTES: Final = 1 << 20
NO_POLICY: Final = ("", "none given")


def policies_of(snapshots: Sequence[Snapshot]) -> list[str]:
    """Names of the policies that a run decides by; empty without one."""
    source = text(snapshots[0], "policy", "source") if snapshots else ""
    return [name for name in source.split(SEPARATOR) if name not in NO_POLICY]


def predict(
    run: RunFolder,
    attempt: str,
    policies: Sequence[str],
    *,
    seeds: int,
    iterations: int,
    on_done: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """The predicted gain of each policy with its interval, or what the trace lacks for a prediction.

    Args:
        run: the run, with segments of a trace.
        attempt: name of the attempt.
        policies: names or files.
        seeds: simulated runs of each policy, at least 2.
        iterations: iterations of a run.
        on_done: called with the share that is done, 0 to 1.

    Raises:
        InputError: without the simulator, and for a run without a trace.
    """
    try:
        from paceenv.core.trace import read_trace
        from paceenv.live.record.merge_segments import write_merged
        from paceenv.policies.whatif import simulated
        from paceenv.policies.whatif.baseline import of_trace
        from paceenv.policies.whatif.change import Change
    except ModuleNotFoundError as error:
        raise needs("paceenv live predict", error.name, "sim") from None

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "merged.parquet"
        merged = write_merged(run, file, attempt)
        trace = read_trace(file)
    found: dict[str, Any] = {"schema": SCHEMA, "attempt": attempt, "ranks": len(merged.spread_s), "policies": []}
    try:
        baseline = of_trace(trace, str(run.path), None, None)
        on_done(0.2)
        changes = [Change(pacing=name) for name in policies]
        answer = simulated.predict(
            baseline,
            changes,
            seeds=seeds,
            first_seed=0,
            iterations=iterations,
            on_done=lambda share: on_done(0.2 + 0.8 * share),
        )
    except InputError as error:
        return found | {"missing": str(error)}
    steps = baseline.measured.steps if baseline.measured is not None else 0
    found |= {
        "missing": "",
        "rests_on": f"{steps} steps of {len(baseline.ranks)} ranks; {answer.method}; the usual limits of delays",
        "assumes": list(answer.assumes),
        "not_identified": list(answer.cannot_tell),
        "left_open": list(answer.left_open),
    }
    for row in answer.changed:
        change = row.against_today.step
        found["policies"].append(
            {
                "policy": row.change.pacing,
                "gain": -change.value,
                "low": -change.high,
                "high": -change.low,
                "outside": None if row.outside is None else str(row.outside),
            }
        )
    return found


def write_prediction(run: RunFolder, found: Mapping[str, Any]) -> None:
    """Keep a prediction with its attempt. Raises InputError if it cannot be written.

    Args:
        run: the folder of the run.
        found: what :func:`predict` returned.
    """
    path = run.path / str(found["attempt"]) / FILE
    atomic_write(path, (json.dumps(finite(found), allow_nan=False) + "\n").encode())


def read_prediction(run: RunFolder, attempt: str) -> dict[str, Any] | None:
    """The prediction of an attempt; None where there is none that can be read.

    Args:
        run: the folder of the run.
        attempt: which of its attempts.
    """
    path = run.path / attempt / FILE
    try:
        with open_regular(path, MAX_BYTES) as stream:
            found = json.loads(stream.read(MAX_BYTES))
    except (InputError, OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None


def lines_of(found: Mapping[str, Any] | None, snapshots: Sequence[Snapshot], folder: str | Path) -> list[str]:
    """A prediction in words; for a run in mode shadow without one, what to do for it.

    Args:
        found: what :func:`read_prediction` returned.
        snapshots: the ranks' last statuses.
        folder: of the run, as its reader named it.
    """
    if found is None:
        shadow = any(number(s, "shadow", "steps") for s in snapshots)
        return [f"predicted gain: not computed yet; next: paceenv live predict {folder} (needs paceenv[sim])"] * shadow
    if why := text(found, "missing"):
        return [f"predicted gain: none, because the trace does not allow one: {why}"]
    policies, lines = entry(found, "policies"), []
    for one in policies if isinstance(policies, list) else ():
        gain, low, high = (number(one, name) for name in ("gain", "low", "high"))
        if gain is None:
            continue
        between = f" [{_percent(low)}, {_percent(high)}]" if low is not None and high is not None else ""
        outside = f"; {text(one, 'outside')}" if text(one, "outside") else ""
        gains = f"{_percent(gain)} %{between} of mean step time"
        lines.append(f"predicted gain of {text(one, 'policy')}: {gains}{outside}")
    return [*lines, f"it rests on {text(found, 'rests_on')}"] if lines else []


def _percent(share: float) -> str:
    return f"{round(100.0 * share, 1) + 0.0:+.1f}"  # no -0.0
