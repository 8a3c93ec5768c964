"""What pacing could win on the described clusters that ship, folded and as programs: the clairvoyant bound.

`python -m benchmarks.programs.described_bounds --write` replaces the last section of
docs/evidence/policies/described-clusters.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from paceenv.core import pacing
from paceenv.policies.base import Policy
from paceenv.policies.clairvoyant import Clairvoyant, candidates
from paceenv.policies.rollout import run
from paceenv.policies.rules import Static
from paceenv.sim.cluster.derive import derive
from paceenv.sim.cluster.model import Cluster, load_cluster
from paceenv.sim.engine.simulator import JobBatch, Simulator, episode_keys
from paceenv.ui import config_files

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "policies" / "described-clusters.md"
HEADING = "## Folded and as programs"
ITERATIONS, INTERVAL = 60, 20
LLAMA_7B = {
    "name": "7 B parameters",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "vocab": 32000,
    "sequence": 8192,
    "positions": 0,
    "tied_embeddings": False,
}
"""The parameters and tokens that h100-ndr names in its remarks."""
H100_GPU = {"name": "H100", "peak_tflops": 989, "achievable_tflops": 400, "memory_gb": 80}


class Case(NamedTuple):
    """A cluster, folded or as a program."""

    name: str
    form: str
    cluster: Cluster


def h100_described(**keys: object) -> Cluster:
    """Cluster h100-ndr, whose job is typed in seconds and bytes, with a description in their place."""
    data = load_cluster("h100-ndr").model_dump()
    data["job"] = {"nodes": 16, "ranks_per_node": 8, "algorithm": "auto"}
    data["workload"] = {
        "model": LLAMA_7B,
        "batch": 1,
        "parameter_dtype": "bf16",
        "gradient_dtype": "bf16",
        "activation_dtype": "bf16",
        "zero_stage": 1,
        "recompute": "full",
        **keys,
    }
    data["gpu"] = H100_GPU
    return config_files.parse(Cluster, data, "h100-ndr")


def cases() -> Iterator[Case]:
    """The five clusters, and what changes on two of them."""
    yield Case("h100-ndr", "as shipped", load_cluster("h100-ndr"))
    yield Case("h100-ndr", "7 B described, folded", h100_described())
    yield Case("h100-ndr", "7 B described, program", h100_described(step="program"))
    for name in ("gpus-512-200g", "superpod-a100", "opt-175b-992", "nano-cluster"):
        one = load_cluster(name)
        label = name
        if name == "superpod-a100":
            one, label = one.with_nodes(10), "superpod-a100 at 10 nodes"
        yield Case(label, "folded", one)
        yield Case(label, "program", one.changed(["workload.step=program"]))
        if name == "opt-175b-992":
            own = ["workload.step=program", "workload.all_gather_group=true"]
            small, label = one.with_nodes(20), "opt-175b at 20 nodes"
            yield Case(label, "program, all-gathers on their own", small.changed(own))
            slow = [*own, "fabric.nic_gbps=20"]
            yield Case(label, "the same, NICs of 20 Gb/s (not shipped)", small.changed(slow))
    experts = {"step": "program", "zero_stage": 0, "experts": 16, "model": {**LLAMA_7B, "layers": 8}, "top_k": 2}
    inside = h100_described(**experts, expert_parallel=8)
    yield Case("h100-ndr", "16 experts, exchanged inside nodes (not shipped)", inside)
    across = h100_described(**experts, expert_parallel=16)
    yield Case("h100-ndr", "16 experts, exchanged between nodes (not shipped)", across)


class Bound(NamedTuple):
    """What was found on a case, gains over no pacing as ratios."""

    step_s: float
    transfers: int
    can_wait: int
    clairvoyant: float
    defer: float
    """The best constant setting of defer."""


def bound(one: Cluster) -> Bound:
    """The clairvoyant bound of a cluster, and the best constant window of defer."""
    batch = derive(one, episode_keys([0]))
    passive = _mean_s(batch, Static({}, "passive"))
    looked = _mean_s(batch, Clairvoyant(horizon=1))
    program = batch.program
    held = 0.0
    if program.can_wait_O.any():
        windows = {float(setting[pacing.DEFER, pacing.WINDOW]) for setting in candidates(can_defer=True)} - {0.0}
        held = max(passive / _mean_s(batch, Static({"defer": (0.0, window)})) - 1.0 for window in windows)
    waiting = int(program.can_wait_O.sum())
    return Bound(passive, len(program.group_O), waiting, passive / looked - 1.0, held)


def _mean_s(batch: JobBatch, policy: Policy | Clairvoyant) -> float:
    """Mean step after the first interval, which is never paced, seconds."""
    found = run(policy, Simulator(batch, episode_keys([0])), ITERATIONS, interval_iterations=INTERVAL)
    return float(found.step_ET[:, INTERVAL:].mean())


def section() -> str:
    """The section of the page."""
    rows = []
    for case in cases():
        found = bound(case.cluster)
        rows.append(
            f"| {case.name} | {case.form} | {found.step_s:.4g} | {found.transfers} | {found.can_wait} | "
            f"{found.clairvoyant:+.3%} | {found.defer:+.3%} |"
        )
        typer.echo(rows[-1])
    table = "\n".join(rows)
    return f"""{HEADING}

Made by `python -m benchmarks.programs.described_bounds --write`.

A described workload ends its step with one collective (`step: folded`), or has every collective where it happens
(`step: program`).
The table says what each form leaves to win: the clairvoyant bound, and the best constant window of rule `defer`.
Both are gains of throughput over no pacing on the same noise, over {ITERATIONS} iterations.
The first {INTERVAL} are without pacing and not counted.
The bound tries `defer` too where transfers can wait.

| cluster | form | step, s | transfers | that can wait | clairvoyant | best constant defer |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
{table}

No shipped description gains from pacing, folded or as a program.
Their transfers are in order on one communicator, lie on links of their own, or hide behind compute.
Holding back a transfer that shares no full link is of no use.
Superpod-a100 was tried with 5 of its 35 replicas, and OPT's separate all-gathers on 20 of 124 nodes.

What is not shipped was tried too: experts that are exchanged between nodes meet the gradients on the NICs.
On evenly spread paths the last row gains 1.6 %.
With the 16 hashed paths of that cluster it gains nothing: most of the delay is in collisions of flows.
"""


def main(write: Annotated[bool, typer.Option(help="Rewrite the section of the page.")] = False) -> None:
    """Compute the table and print it, or put it on the page."""
    text = section()
    if not write:
        typer.echo(text)
        return
    page = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip() + "\n\n" + text
    config_files.write_text(PAGE, page)


if __name__ == "__main__":
    typer.run(main)
