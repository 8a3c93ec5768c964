"""The card of a policy for the Hugging Face Hub: a YAML header as the Hub reads it, and what a user must know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paceenv.core import signals
from paceenv.policies.hub.repository import FILE, PREFIX
from paceenv.policies.policy_file import PolicyFile

ENVIRONMENT = "paceenv/Pacing-v0"
BODY = """
# {name}

A policy of [paceenv](https://pypi.org/project/paceenv/) for the pacing of synchronous distributed training: every
{interval_iterations} iterations each rank sets, from what it sees of itself, threshold and window of the rules
{mechanisms}. It needs numpy and safetensors, no torch.

```sh
paceenv evaluate {prefix}{repository} adaptive --suite demo
paceenv explain {prefix}{repository} --cluster two-jobs
torchrun --nproc-per-node 2 -m paceenv.live --mode shadow --policy {prefix}{repository} train.py
```

## The file

| property | value |
| --- | --- |
| file | `{file}`, data only |
| SHA-256 | `{sha256}` |
| network | {network} |
| control interval | {interval_iterations} iterations |
| preference | {preference} |
| trained by | {algorithm} |
| decisions | {decisions} |
{scores}
## What a rank sees

{table}

{range}
"""


def scores_of(row: Mapping[str, Any] | None) -> list[tuple[str, str, float]]:
    """Split, name and value of what a row of the leaderboard says of its first policy."""
    if row is None:
        return []
    first, split = row["policies"][0], str(row["split"])
    found = [(split, "gap closed", first["gap_closed"]), (split, "throughput gain", first["gain"])]
    if first["worst_null"] is not None:
        found.append((split, "worst null", first["worst_null"][1]))
    return [(where, name, float(value)) for where, name, value in found if value is not None]


def model_card(path: Path, content: PolicyFile, repository: str, row: Mapping[str, Any] | None, licence: str) -> str:
    """The text of ``README.md``.

    Args:
        path: the policy file.
        content: what it holds.
        repository: ``owner/name``.
        row: a row of the leaderboard about it (``paceenv score -o``); None: no scores.
        licence: by the Hub's names, such as ``apache-2.0``.
    """
    policy, record = content.policy, content.provenance
    name, scores = repository.rpartition("/")[2], scores_of(row)
    header: dict[str, Any] = {
        "library_name": "paceenv",
        "license": licence,
        "pipeline_tag": "reinforcement-learning",
        "tags": ["paceenv", "pacing", "reinforcement-learning", "distributed-training", ENVIRONMENT],
    }
    if scores:
        results = [
            {
                "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
                "dataset": {"name": f"leaderboard of paceenv, {split}", "type": ENVIRONMENT},
                "metrics": [{"type": kind.replace(" ", "_"), "name": kind, "value": value}],
            }
            for split, kind, value in scores
        ]
        header["model-index"] = [{"name": name, "results": results}]
    widths = " x ".join(str(len(bias)) for _, bias in policy.layers)
    cell = "" if policy.cell is None else f"{policy.cell.kind} of {policy.cell.units}, then "
    low, high = policy.preference_range or (0.0, 0.0)
    ranges = "; ".join(f"`{key}` {a:g} to {b:g}" for key, (a, b) in content.calibrated_range.items())
    text = BODY.format(
        name=name,
        repository=repository,
        prefix=PREFIX,
        file=FILE,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        interval_iterations=policy.interval_iterations,
        mechanisms=", ".join(f"`{one}`" for one in policy.mechanisms),
        network=f"{cell}layers of {widths}, {policy.activation}",
        preference="none" if policy.preference is None else f"{low:g} to {high:g}, {policy.preference:g} unless told",
        algorithm=record.get("algorithm", "not recorded"),
        decisions=f"{record['timesteps']:,}" if isinstance(record.get("timesteps"), int) else "not recorded",
        scores="".join(f"| {kind}, split {split} | {100 * value:.1f} % |\n" for split, kind, value in scores),
        table=signals.table(),
        range=f"Calibrated for {ranges}. A rank that sees anything else for long stops pacing." if ranges else "",
    )
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n{text}"
