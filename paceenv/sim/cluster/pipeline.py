"""One-forward-one-backward pipeline schedule (Narayanan et al. 2019, PipeDream-flush), executed operation by operation.

Equal stages, m micro-batches, free transfers: ``(m + p - 1)(f + b)``. Unequal stages (an output layer, a slow worker)
and transfers between stages have no closed form, but the recurrence is short.
"""

from __future__ import annotations

from collections.abc import Sequence


def warm_up(stage: int, stages: int, micro_batches: int, parts: int = 1) -> int:
    """Forward passes of a stage, each of one part, before forward and backward take turns."""
    if parts == 1:
        return min(stages - 1 - stage, micro_batches)
    total = micro_batches * parts
    return total if micro_batches == stages else min((stages - stage - 1) * 2 + (parts - 1) * stages, total)


def in_flight(stage: int, stages: int, micro_batches: int, parts: int = 1) -> float:
    """Micro-batches that a stage holds at most between their forward and backward passes; of one part, 1 / parts.

    Interleaved, a first stage holds ``1 + (p - 1) / (p v)`` of all p stages' layers (Korthikanti et al. 2022, section
    4.2.3). Arguments as in :func:`warm_up`.
    """
    return min(warm_up(stage, stages, micro_batches, parts) + 1, micro_batches * parts) / parts


def schedule(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Operations of a stage in order, as (is backward, micro-batch): fill, alternate, drain."""
    ahead = warm_up(stage, stages, micro_batches)
    operations = [(False, i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        operations += [(False, ahead + i), (True, i)]
    return operations + [(True, i) for i in range(micro_batches - ahead, micro_batches)]


def interleaved(stage: int, stages: int, micro_batches: int, parts: int) -> list[tuple[bool, int, int]]:
    """Operations of a stage in order, as (is backward, micro-batch, part of the stage).

    With one part it is :func:`schedule`. With more it is Megatron-LM's interleaved schedule (Narayanan et al. 2021,
    section 2.2): the bubble is ``(p - 1)(f + b)`` divided by the parts.

    Args:
        parts: of each stage; part k of stage s is stage ``k * stages + s`` of the model.
    """
    if parts == 1:
        return [(backward, i, 0) for backward, i in schedule(stage, stages, micro_batches)]

    def place(k: int, backward: bool) -> tuple[bool, int, int]:
        part = k % (stages * parts) // stages
        micro_batch = k // (stages * parts) * stages + k % stages
        return backward, micro_batch, parts - 1 - part if backward else part

    total, ahead = micro_batches * parts, warm_up(stage, stages, micro_batches, parts)
    operations = [place(k, False) for k in range(ahead)]
    for k in range(total - ahead):
        operations += [place(ahead + k, False), place(k, True)]
    return operations + [place(k, True) for k in range(total - ahead, total)]


def pipeline_s(
    stage_forward_s: Sequence[float],
    stage_backward_s: Sequence[float],
    micro_batches: int,
    transfer_s: float | Sequence[float] = 0.0,
) -> float:
    """Time from the first forward to the last backward of any stage, seconds.

    Args:
        transfer_s: time from a stage to its neighbour, seconds: one number, or one for each of the p - 1 borders. Each
            direction of a border carries one transfer at a time, in order, and computing goes on meanwhile.

    Raises:
        ValueError: for lists of other lengths, no stage or no micro-batch.
    """
    p = len(stage_forward_s)
    transfers = [transfer_s] * (p - 1) if isinstance(transfer_s, int | float) else list(transfer_s)
    if len(stage_backward_s) != p or len(transfers) != p - 1 or p < 1 or micro_batches < 1:
        raise ValueError(f"{p} forward times, {len(stage_backward_s)} backward times, {len(transfers)} transfers")
    orders = [schedule(s, p, micro_batches) for s in range(p)]
    next_operation = [0] * p
    free_s = [0.0] * p
    # when a micro-batch's input is there, by direction, stage and micro-batch
    there: list[list[dict[int, float]]] = [[{} for _ in range(p)] for _direction in range(2)]
    there[False][0] = dict.fromkeys(range(micro_batches), 0.0)
    there[True][-1] = dict.fromkeys(range(micro_batches), 0.0)
    link_free_s = [[0.0] * p for _direction in range(2)]
    remaining = 2 * p * micro_batches
    while remaining:
        for s in range(p):
            while next_operation[s] < len(orders[s]):
                backward, i = orders[s][next_operation[s]]
                start = there[backward][s].get(i)
                if start is None:
                    break
                free_s[s] = max(free_s[s], start) + (stage_backward_s if backward else stage_forward_s)[s]
                to = s - 1 if backward else s + 1
                if 0 <= to < p:
                    border = min(s, to)
                    done = max(free_s[s], link_free_s[backward][border]) + transfers[border]
                    link_free_s[backward][border] = there[backward][to][i] = done
                next_operation[s] += 1
                remaining -= 1
    return max(free_s)
