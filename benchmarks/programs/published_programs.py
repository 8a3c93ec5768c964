"""Published steps of real jobs against described workloads as programs.

`python -m benchmarks.programs.published_programs --write` rebuilds docs/evidence/programs.md. The logs that others
recorded are in `--data`, or PACEENV_DATA_DIR, or `../shared/data` beside the checkout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.evidence._mlperf import DATA
from benchmarks.programs._program_cases import (
    TOLERANCE,
    Row,
    hybrid,
    hybrid_share,
    jean_zay,
    megatron,
    megatron_rate,
    priorities,
    torchtitan,
)
from paceenv.ui import config_files, output

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "programs.md"
COLUMNS = ("case", "published", "predicted", "error", "unit", "remark")
HEAD = f"""# Published steps against described programs

Made by `python -m benchmarks.programs.published_programs --write`.

After reading this page you know how well a described workload with `step: program` meets what others published.
Nothing is fitted to the rows below: every section names its inputs and where they come from.
A row within {TOLERANCE:.0%} is met; the others are marked as missed, with what is known of the reason.
No case has an optimizer, a data loader or noise, unless a section says so: predictions tend to be too fast.

"""


def table(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    cells = [
        (
            row.case,
            f"{row.published:,.0f}",
            f"{row.predicted:,.0f}",
            f"{row.error:+.1%}" + ("" if abs(row.error) <= TOLERANCE else " **missed**"),
            row.unit,
            row.remark,
        )
        for row in rows
    ]
    return "\n".join(output.markdown_table(COLUMNS, cells))


def pipelines(data: Path) -> str:
    """The section of the Jean Zay logs; a line where they are missing."""
    folder = data / "jean-zay"
    if not folder.is_dir():
        return "The logs were not there when this page was made."
    return table(jean_zay(folder))


def page(data: Path) -> str:
    """The page."""
    waits = [
        (str(p.experts), f"{p.tokens:,}", f"{p.slowest:.2f}", f"{p.held - 1.0:+.1%}", f"{p.first - 1.0:+.1%}")
        for p in priorities()
    ]
    columns = (
        "experts",
        "tokens of a GPU",
        "slowest exchange / alone",
        "best window of defer",
        "exchanges strictly first",
    )
    experts = "\n".join(output.markdown_table(columns, waits))
    rate = megatron_rate()
    return f"""{HEAD}## Pipelines: BigScience on Jean Zay

Megatron-LM, four V100 a node, tensor parallelism of 4 inside nodes, one stage a node, 4 micro-batches, all recomputed.

Inputs from each log: layers, width, tokens, the first stage's forward and backward compute, the optimizer's time.
Inputs from the bandwidth tests beside the logs: 84.7 Gb/s between four nodes, 991 Gb/s inside one.
Predicted is the whole step, so what is tested is the schedule, its bubble and the transfers between stages.

{pipelines(data)}

## Megatron-LM on A100

The table of April 2021 in the project's README.
Its rates count what is recomputed, and include data loading and the optimizer.

Inputs: layers, width, model-parallel size, GPUs and batch from the table; sequence and vocabulary from the text.
The fabric is that of cluster `superpod-a100`: 8 NICs of 200 Gb/s a node.
Memory moves 2.04 TB/s, from the data sheet, so norms, softmax, dropout and the optimizer take their own time.
The rate of matrix products follows from the row of width 16,384 on 1,920 GPUs: {rate:.0f} TFLOP/s.
The other rows are predicted.
Micro-batches are not in the table: one sample in a pipeline, up to 8 parts without one; plain 1F1B.

{table(megatron(rate))}

With one rate for all kernels, without `gpu.memory_bytes_per_s`, narrow layers come out too fast.
They move more bytes for each product: bytes of softmax and dropout grow with the width, products with its square.
Left out: the two largest models, whose tables have up to ten million instructions, as every rank is simulated.
Left out too: the H100 table of 2024, which does not say how many virtual stages it ran.

## torchtitan on H100

Llama 3.1 8B, December 2024, fully sharded, 8 H100 and 8 NICs of 400 Gb/s a node.

Inputs: batch, sequence and recomputation from its page; reductions in fp32 as is its default.
The rate of kernels follows from the row of 8 GPUs, for each way to compile; the row of 128 GPUs is predicted.
For longer sequences the rate follows from the row of 32,768 tokens.

{table(torchtitan())}

Left out: the row of 70 B, whose rate of kernels has no row of its own, and those of 405 B.
Those have a pipeline and name no number of micro-batches.
The two misses lie in attention, which takes most of these steps; the ring itself hides behind it.

## FSDP and HSDP: pytorch PR #106080

Six encoder and six decoder layers of width 8192 on four nodes of eight A100.

Inputs: the shapes, and the 23 ms that the pull request gives for one encoder layer's all-gather.
That makes 51 Gb/s a NIC for four NICs a node.

{table(hybrid())}

Sharding inside nodes and summing shards between them would take {hybrid_share():.0%} of that step by this model.
The pull request gives no such number in the part that could be read, so that is no test.

## Experts and gradients: Lina

Published: up to 1.73 times shorter steps on 16 A100 (USENIX ATC 2023).
Lina puts all-to-all before all-reduce, cuts tensors, overlaps the pieces with compute, and packs experts on GPUs.
The shapes behind 1.73 could not be read, so this section is not a test of that number.

Assumed: 12 layers of width 1024, two experts a token, four nodes of four A100 at 100 Gb/s, kernels at 0.64 of peak.
Gradients of dense layers are reduced among all 16 GPUs, those of an expert among its replicas.

{experts}

The order alone gives up to 8 % here, although single exchanges take several times as long.
A pass has few exchanges that meet a bucket: **1.73 is not reached by order alone**.
A window of `defer` gets a part of it: one window holds all buckets alike, and the last ones are then late.
The arithmetic of a pass in which every exchange meets a bucket gives 1.33, and the program meets it
(`test_linas_arithmetic`).
"""


def main(
    data: Annotated[Path, typer.Option(help="The folder of data that others recorded.")] = DATA,
    write: Annotated[bool, typer.Option("--write", help="Rebuild docs/evidence/programs.md.")] = False,
) -> None:
    """Print the page, or rebuild it."""
    text = page(data)
    if write:
        config_files.write_text(PAGE, text)
        output.say(f"wrote {PAGE}")
    else:
        typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
