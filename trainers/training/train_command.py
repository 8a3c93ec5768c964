"""``paceenv train``: a policy for many clusters, or with ``--job`` for one job; everything it leaves in a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.calibration.posterior import DRAWS, drawn_clusters
from paceenv.core.errors import InputError
from paceenv.core.intervals import Interval
from paceenv.core.plain import plain
from paceenv.report.recordings import read_trace
from paceenv.sim.cluster import Cluster, load_cluster
from paceenv.trainers.training.train_config import load_train_config
from paceenv.ui import output
from paceenv.ui.config_files import names
from paceenv.ui.json_option import JsonFile
from paceenv.ui.run_directory import prepare_folder
from paceenv.whatif.baseline import is_config, of_trace


def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for policy.safetensors, curve and resolved config.")],
    config: Annotated[str | None, typer.Argument(help="A training config: a file, or a name in configs/train.")] = None,
    job: Annotated[
        str | None,
        typer.Option(help="Train for one job instead: its trace, as paceenv diagnose reads it, or its cluster config."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=10, help="With --job: CPU-seconds of one core to spend, about.")] = 60.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="The learner, instead of the config's, with its own hyperparameters: SAC, distill, ..."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the folder's checkpoints, to the same result.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a config value: total_timesteps=100000")
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Train a pacing policy on the simulator.

    algorithm: in the config says what learns: a class of Stable-Baselines3 or sb3-contrib (PPO, SAC, TQC, CrossQ, ...),
    whose arguments stand in section sb3, or distill, which fits the policy to a teacher that knows the future.

    Writes the policy file, the learning curve (JSON and picture), the resolved config, TensorBoard's event files
    (tensorboard --logdir), and every ten rollouts, or as the selection says, a checkpoint. The same config and seed
    give the same file, digest and all, on one machine, also after an interruption with --resume. A config with a
    selection is scored on validation clusters while it runs, keeps its best policy and stops when the score no longer
    improves.

    With --job it takes about a minute and says whether pacing helps that job at all. A trace is calibrated first, and
    clusters are drawn from the errors of the calibration. A policy is distilled on half of them. On the other half it
    is compared with the best constant setting, with the released policy and with no pacing. The best one is written;
    where nothing is better than no pacing, no policy is written.

    Examples: paceenv train demo -o runs/mine -- paceenv train --job trace.parquet -o runs/job --
    paceenv train distilled -o runs/released --resume -- paceenv train demo -o runs/sac --algorithm SAC
    """
    if (config is None) == (job is None):
        raise InputError("train: a config, or --job with a trace or cluster; allowed: one of the two")
    if job is not None:
        others = {"--algorithm": algorithm, "--resume": resume, "--set": set_}
        if given := [name for name, value in others.items() if value]:
            raise InputError(f"{given[0]} with --job; allowed: --seconds, --seed, --out, --json")
        _refuse_used(out)
        _train_for_job(job, out, seconds, seed or 0, json_)
        return
    changes = [*([] if seed is None else [f"seed={seed}"]), *(set_ or [])]
    resolved = load_train_config(config or "", changes, algorithm)
    if not resume:
        _refuse_used(out)
    # torch, which a refused config need not wait for
    from paceenv.trainers.training.training_run import CHECKPOINT, train_into

    try:
        summary = train_into(resolved, out, resume=resume)
    except KeyboardInterrupt:
        is_kept = (out / CHECKPOINT).exists()
        kept = "the same command with --resume goes on from the last checkpoint"
        output.say(f"interrupted; {kept if is_kept else 'no checkpoint was written yet'}")
        raise
    if output.write_json(summary, json_):
        output.print_table(f"trained {resolved.name}", ("what", "value"), [(k, str(v)) for k, v in summary.items()])
        suite = resolved.name if resolved.name in names("suites") else "held-out"
        output.say(f"next: paceenv evaluate {summary['policy']} best-static --suite {suite}")


def _refuse_used(out: Path) -> None:
    """Raises InputError for a folder with the policy or checkpoint of another run."""
    for held in out.glob("*.safetensors"):
        raise InputError(f"{out}: holds {held.name} of a run; allowed: --resume with its config, or another folder")


def _train_for_job(job: str, out: Path, seconds: float, seed: int, json_: str | None) -> None:
    begun = time.process_time()
    clusters = drawn_clusters(_cluster(job), seed=seed, draws=DRAWS)
    from paceenv.policies.policy_file import save_policy
    from paceenv.trainers.training.job_training import train_for_job
    from paceenv.trainers.training.training_run import POLICY

    path = prepare_folder(out) / POLICY
    left_s = max(seconds - (time.process_time() - begun), 5.0)
    with output.progress(f"train for {clusters[0].name}", left_s) as done:
        trained = train_for_job(clusters, seconds=left_s, seed=seed, on_progress=done)
    summary: dict[str, Any] = {"policy": None, "sha256": None, **plain(trained)}
    if trained.file is not None:
        summary |= {"policy": str(path), "sha256": save_policy(path, trained.file)}
    if not output.write_json(summary, json_):
        return
    output.print_table(
        "gain over no pacing",
        ("policy", "throughput"),
        [(name, _percent(gain)) for name, gain in sorted(trained.gains.items(), key=lambda x: -x[1].value)],
        "on drawn clusters that nothing was trained on and episodes that nothing was chosen on; 95 % over clusters",
    )
    if trained.best is None:
        output.say("pacing will not help this job: nothing is better than no pacing; no policy was written")
    else:
        output.say(f"{trained.best} is best; wrote {path}")


def _cluster(job: str) -> Cluster:
    if is_config([job]):
        return load_cluster(job)
    fit = of_trace(read_trace([job]), job, None, None).fit
    assert fit is not None
    return fit.cluster.model_copy(update={"name": Path(job).stem})


def _percent(gain: Interval) -> str:
    ends = f" [{100 * gain.low:+z.2f}, {100 * gain.high:+z.2f}]" if gain.is_bounded else ""
    return f"{100 * gain.value:+z.2f} %{ends}"
