"""Training: frames per second of Stable-Baselines3's PPO on the native batch and on scalar environments one by one."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from benchmarks._common import Report, Table, Target, command, figure, measure
from paceenv.envs.pacing_env import PacingVectorEnv
from paceenv.envs.registration import register_envs
from paceenv.trainers.training.training_envs import NativeVecEnv

CLUSTER = "null-jitter"
ROWS, N_STEPS, BATCH, EPOCHS = 256, 32, 2048, 4
SCALARS = 8
ROLLOUTS = 3
TARGET = 10.0
NATIVE, DUMMY = f"native batch of {ROWS}, paceenv's settings", f"DummyVecEnv of {SCALARS}, SB3's default settings"


def native_env() -> NativeVecEnv:
    mode = AutoresetMode.SAME_STEP
    return NativeVecEnv([PacingVectorEnv(ROWS, CLUSTER, reward="raw", autoreset_mode=mode, warn_null=False)])


def dummy_env() -> DummyVecEnv:
    return DummyVecEnv(
        [lambda: gymnasium.make("paceenv/Pacing-v0", cluster=CLUSTER, reward="raw", warn_null=False)] * SCALARS
    )


def learner(model: PPO, rollouts: int) -> tuple[Callable[[], object], int]:
    """A call that trains for ``rollouts`` and how many frames that is."""
    frames = rollouts * model.n_steps * model.n_envs
    return lambda: model.learn(frames, reset_num_timesteps=True), frames


def stepper(env: VecEnv, steps: int) -> tuple[Callable[[], object], int]:
    """A call that only steps the environments and how many frames that is: what no faster learner could beat."""
    env.reset()
    actions = np.zeros((env.num_envs, 2), np.float32)

    def run() -> None:
        for _ in range(steps):
            env.step(actions)

    return run, steps * env.num_envs


def run() -> Report:
    """Frames per second of PPO training, native adapter against Stable-Baselines3's usual way."""
    torch.set_num_threads(1)
    register_envs()
    native = PPO(
        "MlpPolicy", native_env(), n_steps=N_STEPS, batch_size=BATCH, n_epochs=EPOCHS, seed=0, device="cpu", verbose=0
    )
    dummy = PPO("MlpPolicy", dummy_env(), seed=0, device="cpu", verbose=0)
    training = {NATIVE: learner(native, ROLLOUTS), DUMMY: learner(dummy, 1)}
    stepping = {NATIVE: stepper(native_env(), 64), DUMMY: stepper(dummy_env(), 64)}
    learn = measure(
        {n: c for n, (c, _) in training.items()}, {n: f for n, (_, f) in training.items()}, turns=3, least_s=0
    )
    step = measure({n: c for n, (c, _) in stepping.items()}, {n: f for n, (_, f) in stepping.items()})
    ratio = learn.speed_ratio(NATIVE, DUMMY)
    rows = [(n, figure(learn.rate(n)), figure(step.rate(n)), f"{learn.rate(n) / step.rate(n):.0%}") for n in training]
    rows.append(("ratio", f"{ratio:.1f}", f"{step.speed_ratio(NATIVE, DUMMY):.1f}", ""))
    table = Table("frames per CPU second", ("", "training", "stepping alone", "share of training spent stepping"), rows)
    data = {
        "frames_per_cpu_s": {"native": learn.rate(NATIVE), "dummy": learn.rate(DUMMY)},
        "native_over_dummy": ratio,
        "stepping_frames_per_cpu_s": {"native": step.rate(NATIVE), "dummy": step.rate(DUMMY)},
        "stepping_native_over_dummy": step.speed_ratio(NATIVE, DUMMY),
    }
    target = Target(
        "training, native over DummyVecEnv", f"at least {TARGET:g} times", f"{ratio:.1f} times", ratio >= TARGET
    )
    text = (
        f"Both train the same network (64x64) on the same environment, `paceenv/Pacing-v0` on `{CLUSTER}` with 8 "
        f"ranks, with one torch thread. Native: n_steps {N_STEPS}, batch {BATCH}, {EPOCHS} epochs. SB3's defaults: "
        "n_steps 2048, batch 64, 10 epochs. Frames per second do not show how many frames a score takes. The defaults "
        f"use every frame ten times in small batches, these settings {EPOCHS} times in large ones."
    )
    return Report("PPO training", text, data, (table,), (target,))


if __name__ == "__main__":
    command(run)
