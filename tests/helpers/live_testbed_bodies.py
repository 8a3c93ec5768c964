"""A rank of a testbed job without its network, for tests of what the job's phases do."""

from __future__ import annotations

from paceenv.live.testbed.training_job import emulated_step

TRANSFERS = ("all_reduce", "gather", "all_to_all")


def transfers_of_every_kind() -> list[str]:
    """Two iterations with every kind of transfer, among all and in groups of neighbours."""
    given = {"bytes": 4096.0, "buckets": 2, "group_size": None, "communicator": None, "background": False}
    phases = [{kind: shape} for kind in TRANSFERS for shape in (given, given | {"group_size": 2})]
    beside = given | {"communicator": "beside", "background": True}
    phases += [{kind: beside} for kind in TRANSFERS]
    step, _ = emulated_step({"seed": [0], "iteration": [*phases, {"barrier": True}]})
    for iteration in range(2):
        step(iteration)
    return sorted(TRANSFERS)
