"""A check of a vector environment against its scalar one, in the manner of ``gymnasium.utils.env_checker``.

Gymnasium checks scalar environments only. This shows whether a *batch* can be trusted, for any pair of factories:

>>> from paceenv.envs.env_checker import check_vector_env, pacing_factories
>>> check_vector_env()  # paceenv/Pacing-v0 with its defaults
>>> check_vector_env(*pacing_factories(cluster="two-jobs", mechanisms=("phase_shift",), cv_weight=(0.0, 2.0)))
>>> check_vector_env(lambda num_envs, threads: MyVectorEnv(num_envs), MyEnv)  # doctest: +SKIP
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeAlias

import gymnasium
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
MakeVector: TypeAlias = Callable[[int, int], AnyVectorEnv]
"""``make_vector(num_envs, threads)``; a vector environment that knows no threads ignores the second number."""
MakeScalar: TypeAlias = Callable[[], gymnasium.Env[Any, Any]]
_PARTS = ("observation", "reward", "terminated", "truncated", "info")


def pacing_factories(**arguments: Any) -> tuple[MakeVector, MakeScalar]:
    """``(make_vector, make_scalar)`` of ``paceenv/Pacing-v0`` with these ``arguments`` of the vector environment."""
    from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv

    scalar = {name: value for name, value in arguments.items() if name != "autoreset_mode"}

    def make_vector(num_envs: int, threads: int) -> AnyVectorEnv:
        return PacingVectorEnv(num_envs, threads=threads, **arguments)

    return make_vector, lambda: PacingEnv(**scalar)


def check_vector_env(
    make_vector: MakeVector | None = None,
    make_scalar: MakeScalar | None = None,
    *,
    num_envs: int = 8,
    steps: int = 150,
    seed: int = 0,
    threads: int = 3,
) -> None:
    """Compare all that a vector environment returns with Gymnasium's ``SyncVectorEnv`` of scalar ones, to the byte.

    A row must also be the same again, in a smaller batch and with other threads; what was returned must not change.

    Args:
        make_vector: makes the vector environment; with ``make_scalar``, or neither for ``paceenv/Pacing-v0`` with
            defaults.
        make_scalar: makes its scalar environment.
        num_envs: rows of the batch, at least 2.
        steps: steps of each run, enough for at least one episode to end.
        seed: row ``n`` gets ``seed + n``; it also seeds the actions.
        threads: number of threads that is compared with one.

    Raises:
        ValueError: if only one of the factories is given.
        AssertionError: with what differs, where, and what was expected.
    """
    if (make_vector is None) != (make_scalar is None):
        raise ValueError("check_vector_env: give both make_vector and make_scalar, or neither")
    if make_vector is None or make_scalar is None:
        make_vector, make_scalar = pacing_factories()
    with closing(make_vector(num_envs, 1)) as envs, closing(make_scalar()) as env:
        for kind in ("observation_space", "action_space"):
            single, scalar = getattr(envs, f"single_{kind}"), getattr(env, kind)
            _require(single == scalar, f"single_{kind} = {single}; expected the scalar environment's {scalar}")
            expected = batch_space(single, num_envs)
            _require(getattr(envs, kind) == expected, f"{kind} = {getattr(envs, kind)}; expected {expected}")
        mode = envs.metadata.get("autoreset_mode")
        modes = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP)
        _require(mode in modes, f"metadata['autoreset_mode'] = {mode!r}; expected one of {modes}")
    batch = _run(make_vector(num_envs, 1), steps, seed)
    same = _run(SyncVectorEnv([make_scalar] * num_envs, autoreset_mode=mode), steps, seed)  # type: ignore[arg-type]
    for t, (ours, theirs) in enumerate(zip(batch, same, strict=True)):
        for name, a, b in zip(_PARTS, ours, theirs, strict=True):
            _require(data_equivalence(a, b, exact=True), f"step {t}: {name} {a}; expected as SyncVectorEnv's {b}")
    _require(any((s[2] | s[3]).any() for s in batch[1:]), f"no episode ended in {steps} steps; expected longer runs")
    for rows, several in ((num_envs, 1), (num_envs, threads), (num_envs - 1, 1), (1, 1)):
        _check_rows(batch, _run(make_vector(rows, several), steps, seed), rows, several)
    other = _run(make_vector(num_envs, 1), steps, seed, num_envs)
    alike = data_equivalence([s[0] for s in batch], [s[0] for s in other], exact=True)
    _require(not alike, f"seeds from {seed + num_envs} on give the run of {seed}; expected another")


def _run(envs: AnyVectorEnv, steps: int, seed: int, later: int = 0) -> list[tuple[Any, ...]]:
    """What ``reset`` and every step returned, observations row by row; a row's actions depend on its number alone."""
    with closing(envs):
        space, samples = envs.single_action_space, []
        for n in range(envs.num_envs):
            space.seed(seed + 7919 * n)
            samples.append([space.sample() for _ in range(steps)])
        observation, info = envs.reset(seed=seed + later)
        returned: list[tuple[Any, ...]] = [(observation, None, None, None, info)]
        kept = copy.deepcopy(returned)
        for actions in zip(*samples, strict=True):
            out: Any = create_empty_array(space, envs.num_envs)
            returned.append(envs.step(concatenate(space, actions, out)))
            kept.append(copy.deepcopy(returned[-1]))
    for t, (now, then) in enumerate(zip(returned, kept, strict=True)):
        for name, a, b in zip(_PARTS, now, then, strict=True):
            _require(
                data_equivalence(a, b, exact=True), f"step {t}: the {name} returned changed later; expected a copy"
            )
        _require(then[0] in envs.observation_space, f"step {t}: {then[0]} is not in {envs.observation_space}")
    return [(list(iterate(envs.observation_space, then[0])), *then[1:]) for then in kept]


def _check_rows(batch: list[tuple[Any, ...]], again: list[tuple[Any, ...]], rows: int, threads: int) -> None:
    """The first rows of the batch, run again in another batch."""
    for t, (ours, theirs) in enumerate(zip(batch, again, strict=True)):
        for name, a, b in zip(_PARTS[:4], ours, theirs, strict=False):
            _require(
                data_equivalence(None if a is None else a[:rows], b, exact=True),
                f"step {t}: {name} {a} differs from {b} in a run of {rows} rows and {threads} threads",
            )


def _require(condition: bool, message: str) -> None:
    """Raise ``AssertionError``; not an ``assert``, which ``python -O`` leaves out."""
    if not condition:
        raise AssertionError(message)
