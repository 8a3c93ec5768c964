"""``paceenv dataset``: offline data sets in Minari's format, and a policy from one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceenv.core import pacing
from paceenv.core.errors import out_of_range
from paceenv.core.renames import mechanism_name
from paceenv.ui import output

if TYPE_CHECKING:
    from paceenv.trainers.offline.episodes import Episode

application = typer.Typer(no_args_is_help=True, help="Make offline data sets in Minari's format, and learn from one.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Minari's id, with a version: paceenv/two-jobs-random-v0")]
Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of all data sets. Default: Minari's own, MINARI_DATASETS_PATH or ~/.minari/datasets."),
]
Mechanism = Annotated[
    list[str] | None, typer.Option("--mechanism", help="What an action sets; repeatable. Default: phase_shift.")
]
Reward = Annotated[
    str | None, typer.Option(help="paired (less what no pacing would give) or raw. Default: paired, of a trace raw.")
]
CvWeight = Annotated[float, typer.Option(min=0.0, help="Weight of the variation in the reward.")]
Intervals = Annotated[int, typer.Option(min=2, help="Longest episode, in control intervals of 20 iterations.")]
Json = Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)]


@application.command()
def simulate(
    name: Name,
    cluster: Annotated[
        list[str] | None,
        typer.Option("--cluster", "-c", help="A cluster config: a file or a name; repeatable. Default: two-jobs."),
    ] = None,
    behaviour: Annotated[
        list[str] | None,
        typer.Option("--behaviour", "-b", help="Who acts: random, or a policy by name or file; repeatable."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Of each behaviour on each cluster.")] = 64,
    intervals: Intervals = 64,
    mechanism: Mechanism = None,
    reward: Reward = None,
    cv_weight: CvWeight = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of the first episode.")] = 0,
    folder: Folder = None,
    json_: Json = None,
) -> None:
    """Let behaviours act in the simulator and keep what they saw, did and got.

    Examples: paceenv dataset simulate paceenv/two-jobs-random-v0 -- paceenv dataset simulate paceenv/mixed-v0
    -c unequal-slack --mechanism slack -b random -b paper --mechanism paper
    """
    from paceenv.sim.cluster import load_cluster
    from paceenv.trainers.offline.simulated_episodes import RANDOM, simulated_episodes

    names, behaviours, kind = _mechanisms(mechanism), behaviour or [RANDOM], _reward(reward or "paired")
    clusters = cluster or ["two-jobs"]
    found: list[Episode] = []
    with output.progress("simulate", len(clusters) * len(behaviours) * intervals) as done:
        for place, config in enumerate(map(load_cluster, clusters)):

            def so_far(n: float, before: int = place * len(behaviours) * intervals) -> None:
                done(before + n)

            found += simulated_episodes(
                config, behaviours, mechanisms=names, episodes=episodes, intervals=intervals, reward=kind,
                cv_weight=cv_weight, seed=seed, on_done=so_far,
            )  # fmt: skip
    where = clusters[0] if len(clusters) == 1 else clusters
    env = {"cluster": where, "mechanisms": list(names), "episode_intervals": intervals, "cv_weight": cv_weight}
    env["reward"] = kind
    words = f"{', '.join(behaviours)} on {', '.join(clusters)}, simulated; reward {kind}"
    _write(name, found, names, words, env, folder, json_)


@application.command()
def trace(
    name: Name,
    paths: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Trace of a job: simulated, of the testbed, or live.")
    ],
    settings: Annotated[
        str | None, typer.Option(help="What made the delays, if there are any: static:slack=0.02/0.3")
    ] = None,
    intervals: Intervals = 64,
    mechanism: Mechanism = None,
    reward: Reward = None,
    cv_weight: CvWeight = 0.1,
    job: Annotated[str | None, typer.Option(help="Which of several jobs.")] = None,
    folder: Folder = None,
    json_: Json = None,
) -> None:
    """Turn a trace into a data set: every rank is an episode, seen through a live rank's own estimator.

    A trace without delays has the null action only: it shows how a job looks, not what pacing would do to it.

    Examples: paceenv dataset trace paceenv/mine-v0 run.parquet -- paceenv dataset trace paceenv/paced-v0 runs/live/mine
    --mechanism slack --settings static:slack=0.02/0.3
    """
    from paceenv.importers.inputs import read_inputs
    from paceenv.trainers.offline.trace_episodes import trace_episodes

    names, kind = _mechanisms(mechanism), _reward(reward or "raw")
    found = trace_episodes(
        read_inputs(paths).require_trace(), mechanisms=names, settings=settings,
        intervals=intervals, reward=kind, cv_weight=cv_weight, job=job,
    )  # fmt: skip
    _write(name, found, names, f"{found[0].record['source']}; reward {kind}", None, folder, json_)


@application.command()
def train(
    name: Name,
    out: Annotated[Path, typer.Option("--out", "-o", help="The policy file to write.")],
    algorithm: Annotated[str, typer.Option(help="td3_bc, or bc: copy the behaviour.")] = "td3_bc",
    updates: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="Of networks and batches.")] = 0,
    folder: Folder = None,
    json_: Json = None,
) -> None:
    """Learn a policy from a data set alone, with TD3+BC or behaviour cloning.

    Examples: paceenv dataset train paceenv/two-jobs-random-v0 -o offline.safetensors; then: paceenv evaluate
    offline.safetensors passive --suite demo
    """
    from paceenv.policies.policy_file import save_policy
    from paceenv.trainers.offline.minari_dataset import read_dataset
    from paceenv.trainers.offline.td3_bc import OfflineConfig, learn_offline

    if algorithm not in ("td3_bc", "bc"):
        raise out_of_range("--algorithm", algorithm, "td3_bc or bc", "dataset train")
    data = read_dataset(name, folder)
    config = replace(OfflineConfig(seed=seed, updates=updates), algorithm=algorithm)  # type: ignore[arg-type]
    with output.progress(f"{algorithm} on {name}", updates) as done:
        content = learn_offline(data, config, done)
    digest = save_policy(out, content)
    summary = {"policy": str(out), "sha256": digest, "transitions": len(data.reward_N), **content.provenance}
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        output.say(
            f"wrote {out}: {algorithm} from {len(data.reward_N)} intervals of {name}; next: paceenv evaluate {out}"
        )


def _write(
    name: str,
    episodes: list[Episode],
    mechanisms: tuple[str, ...],
    description: str,
    env: dict[str, Any] | None,
    folder: Path | None,
    json_: str | None,
) -> None:
    from paceenv.trainers.offline.minari_dataset import write_dataset

    place = write_dataset(name, episodes, mechanisms, description=description, env=env, folder=folder)
    paced, intervals = sum(e.paced for e in episodes), sum(len(e.reward_K) for e in episodes)
    reward = sum(float(e.reward_K.sum()) for e in episodes) / intervals
    summary = {
        "dataset": name, "folder": str(place), "episodes": len(episodes), "intervals": intervals,
        "paced_episodes": paced, "mean_reward": reward, "description": description,
    }  # fmt: skip
    if json_ is not None:
        output.write_json(summary, json_)
    if json_ != "-":
        note = "" if paced else "\nNobody paced: the data show how the job looks, and nothing of what pacing would do."
        rows = [(key.replace("_", " "), f"{v:.4f}" if isinstance(v, float) else str(v)) for key, v in summary.items()]
        output.print_table(f"wrote {name}", ("", ""), rows, f'minari.load_dataset("{name}"){note}')


def _mechanisms(given: list[str] | None) -> tuple[str, ...]:
    names = tuple(mechanism_name(name) for name in given or ["phase_shift"])
    if not {*names} <= {*pacing.MECHANISMS} or len({*names}) < len(names):
        raise out_of_range("--mechanism", names, f"different ones of {', '.join(pacing.MECHANISMS)}", "dataset")
    return names


def _reward(given: str) -> Any:
    if given not in ("paired", "raw"):
        raise out_of_range("--reward", given, "paired or raw", "dataset")
    return given
