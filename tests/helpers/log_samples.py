"""Text logs as training programs write them, from given step times. Each line follows the program's own format string.

Megatron-LM ``training_log``, torchtitan ``MetricsProcessor.log``, NeMo's progress printer, DeepSpeed's
``ThroughputTimer`` and pipeline engine, nanoGPT ``train.py``, build-nanogpt, llm.c, modded-nanogpt, MaxText, ms-swift,
tqdm's default bar, Lightning's ``CSVLogger`` and throughput monitor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
START_S = 1_760_000_000.0


def _clock(t_s: float, form: str = "%Y-%m-%d %H:%M:%S", digits: int = 3, mark: str = ",") -> str:
    stamp = datetime.fromtimestamp(int(t_s), UTC).strftime(form)
    return f"{stamp}{mark}{int((t_s % 1.0) * 10**digits):0{digits}d}" if digits else stamp


def _ends(step_s_T: Array) -> Array:
    return START_S + np.cumsum(step_s_T)


def lines(form: str, step_s_T: Array, every: int = 1, head: str = "") -> str:
    """A line for each ``every`` steps: of step ``n`` of ``of`` (``i`` from 0) with ``x`` s, or the ``mean`` of them."""
    text, of, elapsed_s = head, len(step_s_T), np.cumsum(step_s_T)
    for n in range(every, of + 1, every):
        x, t, mean = float(step_s_T[n - 1]), float(elapsed_s[n - 1]), float(step_s_T[n - every : n].mean())
        values = {"i": n - 1, "n": n, "of": of, "last": of - 1, "x": x, "ms": 1e3 * x, "t": t, "mean": mean}
        values |= {"tok": 5e5 / x, "per_s": 1.0 / x, "samples": 256 / x, "all": 256 * n / t, "usual_per_s": n / t}
        text += form.format(at=_clock(START_S + t), **values) + "\n"
    return text


def nanogpt(step_s_T: Array, every: int = 10) -> str:
    head = "step 0: train loss 4.28, val loss 4.27\n"
    return lines("iter {i}: loss 3.0, time {ms:.2f}ms, mfu 40.00%", step_s_T, every, head)


def megatron(step_s_T: Array, every: int = 10) -> str:
    lines = ["using world size: 64, data-parallel-size: 4", "training ...", "[before the start of training step]"]
    ends = _ends(step_s_T)
    for i in range(every, len(step_s_T) + 1, every):
        mean_ms = 1e3 * step_s_T[i - every : i].mean()
        lines.append(
            f" [{_clock(ends[i - 1], digits=0)}] iteration {i:8d}/{len(step_s_T):8d} | consumed samples: {64 * i:12d} |"
            f" elapsed time per iteration (ms): {mean_ms:.1f} | throughput per GPU (TFLOP/s/GPU): {4e5 / mean_ms:.1f} |"
            f" learning rate: 1.500000E-04 | global batch size:    64 | lm loss: {10 / i:.6E} | loss scale: 1.0 |"
            " grad norm: 9.804 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        lines.append("time (ms) | forward-compute: 306.62 | backward-compute: 575.17 | optimizer: 12.10")
    return "\n".join(lines) + "\n"


def torchtitan(step_s_T: Array, every: int = 1) -> str:
    lines, ends, tokens = ["[titan] INFO - Training starts at step 1"], _ends(step_s_T), 16384.0
    for i in range(every, len(step_s_T) + 1, every):
        tps = round(tokens / step_s_T[i - every : i].mean())
        lines.append(
            f"[rank0]:[titan] {_clock(ends[i - 1])} - root - INFO - \x1b[31mstep: {i:2}  \x1b[32mloss: {8.0:8.5f}  "
            f"\x1b[38;2;180;60;0mgrad_norm: {1.2:7.4f}  \x1b[36mmemory: 30.99GiB(32.62%)  \x1b[34mtps: {tps:,}  "
            f"\x1b[36mtflops: 407.35  \x1b[35mmfu: 41.19%\x1b[39m"
        )
        if i % (10 * every) == 0:
            lines.append(
                f"[rank0]:[titan] {_clock(ends[i - 1])} - root - INFO - validate step: {i:2}  loss:  7.1  tps: 9"
            )
    return "\n".join(lines) + "\n"


def modded_nanogpt(step_s_T: Array) -> str:
    lines, elapsed_s = [], np.cumsum(step_s_T)
    for i, t in enumerate(elapsed_s, 1):
        if i % 25 == 0:
            lines.append(
                f"step:{i}/{len(step_s_T)} val_loss:3.4 train_time:{1e3 * t:.0f}ms step_avg:{1e3 * t / i:.2f}ms"
            )
        lines.append(f"step:{i}/{len(step_s_T)} train_time:{1e3 * t:.0f}ms step_avg:{1e3 * t / i:.2f}ms")
    return "\n".join(lines) + "\n"


def tqdm(step_s_T: Array) -> str:
    """A bar redrawn with carriage returns, whose times are whole seconds."""
    text, n = "", len(step_s_T)
    for i, t in enumerate(np.cumsum(step_s_T), 1):
        text += bar(i, n, float(t), unit="it/s, loss=2.3")
        text += bar(i, n, 1.0, "Validation: ") + "\n" if i % 50 == 0 else ""
    return text + "\n"


def bar(done: int, of: int, elapsed_s: float, about: str = "", unit: str = "it/s") -> str:
    """One redraw of tqdm's bar."""
    hours, minutes, seconds = int(elapsed_s // 3600), int(elapsed_s // 60) % 60, int(elapsed_s) % 60
    clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
    return f"\r{about}{100 * done // of:3d}%|###   | {done}/{of} [{clock}<00:10, 2.00{unit}]"


def bars(of: int, step_s: float, about: str = "", unit: str = "it/s") -> str:
    """A bar from its beginning to its end."""
    return "".join(bar(i, of, i * step_s, about, unit) for i in range(of + 1)) + "\n"


def huggingface(evaluation: str, pause_s: float, steps: int = 1000, step_s: float = 2.0) -> str:
    """Hugging Face's bar, which waits at every 200th step while a bar of an evaluation runs, ``pause_s`` seconds."""
    text, waited_s = "", 0.0
    for i in range(steps + 1):
        text += bar(i, steps, i * step_s + waited_s)
        if i and i % 200 == 0:
            text += f"{evaluation}{{'eval_loss': 2.1, 'eval_runtime': {pause_s}}}\n"
            waited_s += pause_s
    return text + "\n"


def trainer_state(step_s_T: Array) -> str:
    """Hugging Face's state of a trainer that logs its step time (TRL does)."""
    history = [{"epoch": 0.1, "loss": 2.5, "step": i, "step_time": float(x)} for i, x in enumerate(step_s_T, 1)]
    return json.dumps({"best_metric": None, "global_step": len(step_s_T), "log_history": history})


_DEEPSPEED = "[2025-02-27 23:34:53,987] [INFO] [config.py:1001:print]   train_batch_size ............. 256\n"
LOGS: dict[str, Callable[[Array], str]] = {
    "Megatron-LM": megatron,
    "torchtitan": torchtitan,
    "NeMo": partial(
        lines,
        "Training epoch 0, iteration {i}/{last} | lr: 1.961e-06 | global_batch_size: 8 | global_step: {i} | "
        "reduced_train_loss: 1.315 | train_step_timing in s: {x:.4g} | consumed_samples: 64",
    ),
    "DeepSpeed (samples/s)": partial(
        lines,
        "[{at}] [INFO] [timer.py:264:stop] epoch=0/micro_step={n}/global_step={n}, RunningAvgSamplesPerSec={all}, "
        "CurrSamplesPerSec={samples}, MemAllocated=6.1GB, MaxMemAllocated=30.2GB",
        every=10,
        head=_DEEPSPEED,
    ),
    "DeepSpeed": partial(lines, "steps: {n} loss: 2.1034 iter time (s): {mean:0.3f} samples/sec: 12.345", every=10),
    "nanoGPT": nanogpt,
    "build-nanogpt": partial(
        lines, "step {i:5d} | loss: 3.123456 | lr 6.0000e-04 | norm: 0.3012 | dt: {ms:.2f}ms | tok/sec: {tok:.2f}"
    ),
    "llm.c": partial(
        lines,
        "step {n:4d}/{of} | loss 7.577051 (+nanz)| norm 1.1461 (+nanz)| lr 3.00e-04 | {ms:.2f} ms | 56.3% bf16 MFU | "
        "{tok:.0f} tok/s",
    ),
    "modded-nanogpt": modded_nanogpt,
    "MaxText": partial(
        lines, "completed step: {i}, seconds: {x:.3f}, TFLOP/s/device: 160.1, Tokens/s/device: 3000.1, loss: 9.876"
    ),
    "ms-swift": partial(
        lines,
        "{{'loss': 1.606, 'grad_norm': 1.97, 'learning_rate': 0.0001, 'memory(GiB)': 2.44, 'train_speed(iter/s)': "
        "{usual_per_s:.6f}, 'epoch': 0.0, 'global_step/max_steps': '{n}/{of}', 'percentage': '0.01%'}}",
        every=5,
    ),
    "progress bar (tqdm)": tqdm,
    "JSON lines": partial(lines, '{{"loss": 2.5, "global_step": {n}, "timing": {{"step_time": {x}}}}}'),
    "CSV": partial(
        lines, "0,{i},2.5,{per_s},{t}", head="epoch,step,train_loss,train|device/batches_per_sec,train|time\n"
    ),
    "trainer_state.json": trainer_state,
    "time stamps": partial(lines, "{at} INFO train.py:88 step {n} loss 2.31 lr 1e-4"),
}


def srun(text: str, ranks: int = 3) -> str:
    """As ``srun -l`` shows it: every task's lines with its number; only the last rank's have the log."""
    lines = text.splitlines()
    out = []
    for i, line in enumerate(lines):
        out += [f"{r:2d}: some warning of NCCL" for r in range(ranks - 1) if i % 7 == 0]
        out.append(f"{ranks - 1:2d}: {line}")
    return "\n".join(out) + "\n"


def mpirun(text: str) -> str:
    """As ``mpirun --tag-output`` shows it."""
    return "".join(f"[1,3]<stdout>:{line}\n" for line in text.splitlines())


def torchrun(text: str) -> str:
    """As torchrun shows it with ``--tee 3``."""
    return "".join(f"[default7]:{line}\n" for line in text.splitlines())
