"""``paceenv calibrate`` of nccl-tests output: the law of its links, printed and written as a cluster's fabric."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceenv.calibration.bandwidth import BandwidthFit, fit_bandwidth
from paceenv.core.errors import InputError
from paceenv.importers.nccl_tests import Table
from paceenv.report.section import Section, print_sections
from paceenv.sim.cluster import load_cluster
from paceenv.ui import config_files, output


def calibrate_links(
    tables: Sequence[Table], out: Path | None, json_: str | None, base: str | None, per_node: int | None
) -> None:
    """Print the laws of tables, and write the cluster of one; ``base`` gets the links where it is given."""
    fits = [fit_bandwidth(table) for table in tables]
    nodes = [fit.nodes(per_node) for fit in fits]
    for warning in (line for fit in fits for line in fit.warnings(per_node)):
        output.say(f"warning: {warning}")
    if out is not None:
        if len(fits) > 1:
            named = ", ".join(fit.table.source for fit in fits[:4])
            raise InputError(f"--out: {len(fits)} tables ({named}); allowed: one, whose law is written")
        if fits[0].refused:
            raise InputError(f"{fits[0].table.source}: {fits[0].refused}, so no config is written")
        if base is None:
            linked = fits[0].to_cluster(out.stem, nodes[0])
        else:  # with these keys of its fabric
            values = fits[0].to_config(nodes[0] == 1).items()
            linked = load_cluster(base).changed([f"fabric.{key}={value}" for key, value in values], base)
        config_files.write_yaml(out, linked.model_dump(exclude_defaults=True))
    if json_ is not None:
        results = [_to_json(*one, per_node) for one in zip(fits, nodes, strict=True)]
        output.write_json(results[0] if len(results) == 1 else {"tables": results}, json_)
    if json_ == "-":
        return
    print_sections([Section("Links", [fit.text for fit in fits])])
    if out is not None:
        if base is None:
            output.say("the table has no compute: job.compute_s is a stand-in; set yours with --set job.compute_s=...")
        output.say(f"wrote {out}; next: paceenv simulate {shlex.quote(str(out))}")


def _to_json(fit: BandwidthFit, nodes: int, per_node: int | None) -> dict[str, Any]:
    table, law = fit.table, fit.law
    sizes = zip(table.size_bytes.tolist(), fit.residual.tolist(), strict=True)
    return {
        "source": table.source,
        "op": table.op,
        "members": table.members,
        "hop_s": {"value": law.hop_s, "se": fit.hop_se},
        "bandwidth_Bps": {"value": law.bandwidth_Bps, "se": fit.bandwidth_se},
        "sqrt_s": {"value": law.sqrt_s, "se": fit.sqrt_se},
        "nodes": nodes or None,
        "ranks_per_node": table.members // nodes if nodes else None,
        "place": "inside" if nodes == 1 else "across",
        "left_out": list(table.notes),
        "warnings": list(fit.warnings(per_node)),
        "misfit": fit.misfit,
        "residuals": [{"size_bytes": size, "relative": residual} for size, residual in sizes],
        "fabric": fit.to_config(nodes == 1),
    }
