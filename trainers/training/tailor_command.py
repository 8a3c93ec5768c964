"""``paceenv tailor``: from a job's trace or cluster to a policy file for that job, in about a minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paceenv.calibration.fit_trace import calibrate_trace
from paceenv.calibration.posterior import DRAWS, drawn_clusters
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.limits import LIMIT_HELP, LIMITS
from paceenv.importers.inputs import read_inputs
from paceenv.policies.whatif.baseline import is_config
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.ui import output


def tailor(
    source: Annotated[
        str,
        typer.Argument(
            help="A trace as paceenv diagnose reads it, or a cluster: a file, or a name in configs/clusters."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The policy file to write (.safetensors).")],
    seconds: Annotated[float, typer.Option(min=10, help="CPU-seconds of one core to spend, about.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the training and of the drawn clusters.")] = 0,
    against: Annotated[
        list[str] | None, typer.Option(help="Policies that take part, by name or file. Default: learned.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help=LIMIT_HELP),
    ] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Find the best policy for one job, and say whether pacing helps it at all.

    A trace is calibrated first. Clusters are drawn from the errors of the calibration; a cluster config without a
    calibration is taken as it is. A student of a teacher that knows the future is trained on half of them. On the other
    half it is compared with the best constant setting, with the released policy and with no pacing. The best one is
    written, with what it was compared with; where nothing is better than no pacing, no file is written.

    Examples: paceenv tailor trace.parquet -o mine.safetensors -- paceenv tailor unequal-slack -o mine.safetensors
    """
    if out.suffix != ".safetensors" or out.is_dir():
        raise InputError(f"--out {out}: allowed: the name of a file that ends in .safetensors")
    begun, limits = time.process_time(), LIMITS.changed(limit or [])
    clusters = drawn_clusters(_cluster(source), seed=seed, draws=DRAWS)
    from paceenv.policies.policy_file import save_policy
    from paceenv.trainers.training.tailor import tailor as find  # torch, which a refused argument need not wait for

    left_s = max(seconds - (time.process_time() - begun), 5.0)
    with output.progress(f"tailor {clusters[0].name}", left_s) as done:
        found = find(
            clusters,
            ["learned"] if against is None else against,
            seconds=left_s,
            seed=seed,
            limits=limits,
            on_progress=done,
        )
    stale = found.file is None and out.exists()
    summary = {"policy": None, "sha256": None, **found.to_json()}
    if found.file is not None:
        summary |= {"policy": str(out), "sha256": save_policy(out, found.file)}
    if json_ is not None:
        output.write_json(summary, json_)
    if stale:
        output.say(f"{out} is of an earlier run and was left as it is; exit code 1, as nothing was written")
    if json_ == "-":
        raise typer.Exit(int(stale))
    rows = [(name, _percent(gain)) for name, gain in sorted(found.gains.items(), key=lambda x: -x[1].value)]
    output.print_table(
        "gain over no pacing",
        ("policy", "throughput"),
        rows,
        "on drawn clusters that nothing was trained on and episodes that nothing was chosen on; 95 % over clusters",
    )
    if found.best is None:
        output.say("pacing will not help this job: nothing is better than no pacing; no file was written")
    elif found.file is None:
        output.say(f"{found.best} is best; it is a rule and needs no file")
    else:
        output.say(f"{found.best} is best; wrote {out}")
    raise typer.Exit(int(stale))


def _cluster(source: str) -> Cluster:
    if is_config([source]):
        return load_cluster(source)
    inputs = read_inputs([source])
    for note in inputs.notes:
        output.say(note)
    return calibrate_trace(inputs.require_trace(), name=Path(source).stem).cluster


def _percent(gain: Interval) -> str:
    ends = f" [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]" if gain.is_bounded else ""
    return f"{100 * gain.value:+.2f} %{ends}"
