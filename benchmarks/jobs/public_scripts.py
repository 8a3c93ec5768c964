"""Public training scripts with and without the live agent: are the parameters equal, and is the page right?

`python -m benchmarks.jobs.public_scripts --sources DIR --out DIR` copies each script from a clone of its repository
(`DIR/owner+name`, made with git where it is missing), adapts devices and sizes in the copy, makes one rank slow and
runs it twice. None of these repositories' code is kept here: only where it is, and what is changed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.jobs.live_shapes import FAILED, ROOT, SETTINGS, SLOW_S, Run, asked, judge
from paceenv.core.errors import InputError
from paceenv.ui import output
from paceenv.ui.output import markdown_table

DEADLINE_S = 240.0
PRELUDE = "import benchmarks.jobs._public_prelude as _prelude\n"
DEVICES: tuple[tuple[str, str], ...] = (
    (r"torch\.(cuda|accelerator)\.(set_device|set_device_index|device_index)\([^\n]*\)", "None"),
    (r"torch\.accelerator\.is_available\(\)", "True"),
    (r"torch\.(accelerator|cuda)\.device_count\(\)", "8"),
    (r"torch\.accelerator\.current_accelerator\(\)", 'torch.device("cpu")'),
    (r"torch\.device\(f\"\{\w+(\.\w+)*\}:\{\w+(\.\w+)*\}\"\)", 'torch.device("cpu")'),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r",\s*device_id=\w+\)", ")"),
    (r"([\"'])nccl\1", '"gloo"'),
    (r"f([\"'])cuda:\{[^}\"']*\}\1", '"cpu"'),
    (r"\.to\((self\.)?(gpu_id|local_rank|rank)\)", '.to("cpu")'),
    (r"pin_memory=True", "pin_memory=False"),
)
"""Lines that choose a GPU, in every file of a script's folder."""


@dataclass(frozen=True)
class Script:
    """A public script, and what is changed so that it trains a small model for a minute on two cores."""

    name: str
    repository: str
    commit: str
    licence: str
    path: str
    arguments: str = ""
    folder: str = ""
    """What is copied; default: the folder of the script."""
    ranks: int = 2
    itself: bool = False
    """It starts its own processes."""
    changes: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Regular expressions and what takes their place, by file."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Files that are made, relative to the script: text, or numbers of an array of 16 bits."""
    needs: str = ""
    """What the prelude replaces."""


EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "BSD-3-Clause")
ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", "Apache-2.0")
TOKENS = np.random.default_rng(0).integers(0, 64, 20_000)
TEXT = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 6_000)))
SENTENCES = [(r"def training_function\(", "get_dataloaders = _prelude.sentences\ndef training_function(")]


def _accelerate(name: str, path: str, arguments: str = "--cpu") -> Script:
    file = Path(path).name
    return Script(name, *ACCELERATE, f"examples/{path}", arguments, changes={file: SENTENCES}, needs="bert")


SCRIPTS = (
    Script(
        "nanoGPT",
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "MIT",
        "train.py",
        "--dataset=made --device=cpu --dtype=float32 --compile=False --backend=gloo --n_layer=2 --n_head=2 --n_embd=32 "
        "--block_size=32 --batch_size=4 --gradient_accumulation_steps=4 --max_iters=90 --eval_interval=50 "
        "--eval_iters=2 --lr_decay_iters=90",
        files={"data/made/train.bin": TOKENS, "data/made/val.bin": TOKENS},
    ),
    Script(
        "llama2.c",
        "karpathy/llama2.c",
        "350e04fe35433e6d2941dce5a1f53308f87058eb",
        "MIT",
        "train.py",
        "--device=cpu --dtype=float32 --compile=False --vocab_source=custom --vocab_size=64 --dim=32 --n_layers=2 "
        "--n_heads=2 --n_kv_heads=2 --max_seq_len=32 --batch_size=4 --gradient_accumulation_steps=2 --max_iters=90 "
        "--eval_interval=50 --eval_iters=2",
        files={f"data/tok64/data{shard:02d}.bin": TOKENS for shard in range(3)},
        changes={"train.py": [(r"num_workers=\d+", "num_workers=0")]},
    ),
    Script(
        "DDP tutorial, torchrun",
        *EXAMPLES,
        "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        "3 10 --batch_size 16",
    ),
    Script(
        "DDP tutorial, mp.spawn",
        *EXAMPLES,
        "distributed/ddp-tutorial-series/multigpu.py",
        "3 10 --batch_size 16",
        itself=True,
    ),
    Script(
        "FSDP2 example",
        *EXAMPLES,
        "distributed/FSDP2/example.py",
        changes={
            "example.py": [
                (r"range\(10\)", "range(80)"),
                (r"n_layers=10", "n_layers=2"),
                (r"vocab_size = 1024", "vocab_size = 64"),
                (r"batch_size = 32", "batch_size = 2"),
            ],
            "model.py": [(r"dim: int = \d+", "dim: int = 32")],
        },
    ),
    Script(
        "minGPT, Hydra",
        *EXAMPLES,
        "distributed/minGPT-ddp/mingpt/main.py",
        "data_config.path=data/made.txt data_config.block_size=16 data_config.truncate=0.1 gpt_config.n_layer=2 "
        "gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.max_epochs=3 trainer_config.batch_size=8 "
        "trainer_config.data_loader_workers=0 trainer_config.use_amp=False",
        files={"data/made.txt": TEXT},
    ),
    Script(
        "tensor parallel with DTensor",
        *EXAMPLES,
        "distributed/tensor_parallelism/tensor_parallel_example.py",
        changes={"tensor_parallel_example.py": [(r"num_iters = 10", "num_iters = 120")]},
    ),
    Script(
        "sequence parallel with DTensor",
        *EXAMPLES,
        "distributed/tensor_parallelism/sequence_parallel_example.py",
        ranks=4,
        changes={"sequence_parallel_example.py": [(r"num_iters = 10", "num_iters = 120")]},
    ),
    Script(
        "ImageNet, ResNet-18",
        *EXAMPLES,
        "imagenet/main.py",
        "--dummy --arch resnet18 --batch-size 2 --epochs 1 --workers 0 --dist-backend gloo --dist-url env:// "
        "--print-freq 50",
        changes={
            "main.py": [
                (r"1281167, \(3, 224, 224\)", "160, (3, 32, 32)"),
                (r"50000, \(3, 224, 224\)", "8, (3, 32, 32)"),
                (r"args\.gpu is not None", "False"),
                (r"device\.type ?== ?'cuda'", "True"),
                (r"model\.cuda\(\)", "model"),
            ]
        },
    ),
    _accelerate("accelerate, sentences", "nlp_example.py"),
    _accelerate(
        "accelerate, accumulation", "by_feature/gradient_accumulation.py", "--cpu --gradient_accumulation_steps 2"
    ),
    _accelerate("accelerate, local SGD", "by_feature/local_sgd.py", "--cpu --local_sgd_steps 4"),
    _accelerate("accelerate, communication hook", "by_feature/ddp_comm_hook.py", "--ddp_comm_hook fp16"),
    Script(
        "Hugging Face Trainer, Alpaca",
        "tatsu-lab/stanford_alpaca",
        "761dc5bfbdeeffa89b8bff5d038781a4055f796a",
        "Apache-2.0",
        "train.py",
        "--data_path made.json --output_dir saved --use_cpu --num_train_epochs 1 --per_device_train_batch_size 2 "
        "--report_to none --save_strategy no --logging_steps 20",
        files={
            "made.json": json.dumps(
                [{"instruction": TEXT[k : k + 9], "input": "", "output": TEXT[k + 9 : k + 20]} for k in range(320)]
            )
        },
        changes={
            "train.py": [(r"tokenizer=tokenizer, args", "processing_class=tokenizer, args")],
            "utils.py": [
                (r"(?m)^import openai$", ""),
                (r"(?m)^from openai import.*$", ""),
                (r"openai_object\.\w+|openai\.\w+", "object"),
            ],
        },
        needs="llama",
    ),
    Script(
        "Lightning, bug report model",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "Apache-2.0",
        "examples/pytorch/bug_report/bug_report_model.py",
        changes={
            "bug_report_model.py": [
                (r"lightning\.pytorch", "pytorch_lightning"),
                (r"limit_train_batches=1", 'limit_train_batches=120, accelerator="cpu", devices=2, strategy="ddp"'),
                (r"RandomDataset\(32, 64\)", "RandomDataset(32, 640)"),
            ]
        },
    ),
    Script(
        "Lightning, starting its own ranks",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "Apache-2.0",
        "examples/pytorch/bug_report/bug_report_model.py",
        itself=True,
        changes={
            "bug_report_model.py": [
                (r"lightning\.pytorch", "pytorch_lightning"),
                (r"limit_train_batches=1", 'limit_train_batches=120, accelerator="cpu", devices=2, strategy="ddp"'),
                (r"RandomDataset\(32, 64\)", "RandomDataset(32, 640)"),
            ]
        },
    ),
)


def fetch(script: Script, sources: Path) -> Path:
    """The git directory of the script's repository; cloned where it is missing."""
    place = sources / script.repository.replace("/", "+")
    for folder in (place / "repo", place / ".git", place):
        if (folder / "HEAD").exists():
            return folder
    url = f"https://github.com/{script.repository}"
    cloned = subprocess.run(["git", "clone", "--quiet", "--bare", url, str(place)], stderr=subprocess.PIPE, text=True)
    if cloned.returncode:
        raise InputError(f"--sources {sources}: no clone of {script.repository}: {cloned.stderr.strip()[:200]}")
    return place


def prepare(script: Script, sources: Path, folder: Path) -> None:
    """Copy the script's folder as of its commit, and adapt the copy."""
    inside = script.folder or str(Path(script.path).parent)
    git = ["git", "--git-dir", str(fetch(script, sources))]
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", script.commit, inside], capture_output=True, text=True
    )
    wanted = [name for name in listed.stdout.splitlines() if name.endswith((".py", ".yaml"))]
    packed = subprocess.run([*git, "archive", script.commit, *wanted], capture_output=True, check=False)
    if packed.returncode or not wanted:
        problem = (listed.stderr or packed.stderr.decode()).strip()[:200]
        raise InputError(f"{script.repository}: {script.path} at {script.commit}: {problem}")
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    home = (folder / script.path).parent
    for file in home.glob("*.py"):
        text = file.read_text()
        for pattern, replacement in (*DEVICES, *script.changes.get(file.name, ())):
            text = re.sub(pattern, replacement, text)
        if file.name == Path(script.path).name:
            first = re.search(r"(?m)^from __future__.*\n", text)
            at = first.end() if first else 0
            text = text[:at] + PRELUDE + text[at:]
        file.write_text(text)
    for name, content in script.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (home / name).write_text(content)
        else:
            (home / name).write_bytes(content.astype(np.uint16).tobytes())


def start(script: Script, folder: Path, python: str, *, agent: bool) -> str:
    """Run the copy in its folder; returns why it failed, or ""."""
    told = folder / "told"
    told.mkdir()
    home = (folder / script.path).parent
    launcher = (
        [] if script.itself else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}"]
    )
    watched = ["-m", "paceenv.live", "--out", str(folder / "live")] if agent else []
    environ = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT), "PUBLIC_NEEDS": script.needs, "PUBLIC_TOLD": str(told)}
    environ |= {"PUBLIC_SLOW": "1", "PUBLIC_SLOW_S": str(SLOW_S), "HF_HUB_OFFLINE": "1"}
    if script.itself:
        environ |= {"MASTER_ADDR": "127.0.0.1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [python, *launcher, *watched, Path(script.path).name, *script.arguments.split()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            cwd=home,
        )
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return f"not through after {DEADLINE_S:g} s"
    return f"exit code {code}" if code else ""


def measure(script: Script, sources: Path, out: Path, python: str) -> dict[str, Any]:
    """Both runs of a script and what the page says of the one with the agent."""
    about: dict[str, Any] = {
        "name": script.name,
        "repository": script.repository,
        "commit": script.commit,
        "licence": script.licence,
    }
    about |= {"path": script.path, "ranks": script.ranks}
    figures: dict[bool, list[dict[str, Any]]] = {}
    for agent in (False, True):
        folder = out / re.sub(r"\W+", "-", script.name) / ("agent" if agent else "bare")
        prepare(script, sources, folder)
        problem = start(script, folder, python, agent=agent)
        files = sorted((folder / "told").glob("rank*.json"))
        figures[agent] = [json.loads(file.read_text()) for file in files]
        if not problem and len(files) != script.ranks:
            problem = f"{len(files)} of {script.ranks} ranks told what they trained"
        if problem:
            return about | {
                "verdict": FAILED,
                "equal": None,
                "reason": ("with" if agent else "without") + f": {problem}",
            }
    ranks, page = asked(folder)
    (folder / "page.txt").write_text(page)
    found = judge(Run(script.name, script.ranks, 1, "load"), ranks, page, figures[True])
    equal = [rank["hash"] for rank in figures[False]] == [rank["hash"] for rank in figures[True]]
    return about | found | {"steps": figures[True][0]["steps"], "equal": equal}


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The results in Markdown."""
    rows = [
        (
            r["name"],
            f"{r['repository']}, {r['path']}",
            r["commit"][:8],
            r["licence"],
            str(r["ranks"]),
            {True: "equal", False: "**differ**", None: ""}[r["equal"]],
            r["verdict"],
            "" if r.get("stated_s") is None else f"{1e3 * r['stated_s']:.1f} of {1e3 * r['wanted_s']:.1f} ms",
            r["reason"],
        )
        for r in results
    ]
    columns = ("script", "file", "commit", "licence", "ranks", "parameters", "rank 1, slow", "late by", "reason")
    return markdown_table(columns, rows)


def main(
    sources: Annotated[Path, typer.Option(help="Folder with clones of the repositories, owner+name each.")],
    out: Annotated[Path, typer.Option(help="Folder for the copies and their output.")],
    python: Annotated[str, typer.Option(help="Interpreter with the packages that the scripts need.")] = sys.executable,
    only: Annotated[str, typer.Option(help="Regular expression: only scripts whose name has it.")] = "",
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Run the scripts one after the other, each without and with the agent; print a table in Markdown."""
    scripts, results = [script for script in SCRIPTS if re.search(only, script.name)], []
    try:
        with output.progress("scripts", len(scripts)) as advance:
            for script in scripts:
                results.append(found := measure(script, sources.resolve(), out.resolve(), python))
                advance(len(results))
                said = (
                    f"parameters equal: {found['equal']}; {found['verdict']} {found.get('named', '')} {found['reason']}"
                )
                output.say(f"{len(results)}/{len(scripts)} {script.name}: {said}")
        if json_ is not None:
            output.write_json({"scripts": results, "counts": Counter(r["verdict"] for r in results)}, json_)
    except InputError as error:
        output.say(f"error: {error}")
        raise typer.Exit(2) from None
    if json_ != "-":
        print("\n".join(table(results)))


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(main)
    application()
