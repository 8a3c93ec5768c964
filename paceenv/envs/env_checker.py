"""Checks of a vector environment against its scalar one, in the manner of ``gymnasium.utils.env_checker``.

Gymnasium checks scalar environments only. These checks show whether a *batch* can be trusted: its rows equal the scalar
environment byte for byte and across autoresets, for any batch size and number of threads. They use only Gymnasium's
public API, so they work for any pair of factories, for example to check a wrapper:

>>> from paceenv.envs.env_checker import check_vector_env, pacing_factories
>>> check_vector_env()  # paceenv/Pacing-v0 with its defaults
>>> check_vector_env(*pacing_factories(cluster="two-jobs", mechanisms=("phase_shift",), cv_weight=(0.0, 2.0)))
>>> check_vector_env(lambda num_envs, threads: MyVectorEnv(num_envs), MyEnv)  # doctest: +SKIP

Each ``check_*`` raises :class:`AssertionError` with one message: what differs, where, and what was expected. The
reference is the scalar environments under Gymnasium's own ``SyncVectorEnv``, in the autoreset mode that the vector
environment declares. Legend: T steps, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]
AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
MakeVector: TypeAlias = Callable[[int, int], AnyVectorEnv]
"""``make_vector(num_envs, threads)``; a vector environment that knows no threads ignores the second number."""
MakeScalar: TypeAlias = Callable[[], AnyEnv]

_FAR_OUTSIDE = (2.0, -2.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
"""Actions that no policy should send and that a diverging one does."""


def pacing_factories(**arguments: Any) -> tuple[MakeVector, MakeScalar]:
    """``(make_vector, make_scalar)`` of ``paceenv/Pacing-v0`` with these ``arguments`` of the vector environment."""
    from paceenv.envs.pacing_env import PacingEnv, PacingVectorEnv

    def make_vector(num_envs: int, threads: int) -> AnyVectorEnv:
        return PacingVectorEnv(num_envs, threads=threads, **arguments)

    scalar = {name: value for name, value in arguments.items() if name != "autoreset_mode"}
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
    """Run every check below.

    Args:
        make_vector: makes the vector environment; with ``make_scalar``, or neither for ``paceenv/Pacing-v0`` with
            defaults.
        make_scalar: makes its scalar environment.
        num_envs: rows of the batch, at least 2.
        steps: steps of each run, enough for at least one episode to end.
        seed: row ``n`` gets ``seed + n``; it also seeds the actions.
        threads: number of threads that is compared with one.

    Raises:
        ValueError: if the arguments cannot lead to a meaningful check.
        AssertionError: with what differs, where, and what was expected.
    """
    if (make_vector is None) != (make_scalar is None):
        raise ValueError("check_vector_env: give both make_vector and make_scalar, or neither")
    if num_envs < 2 or steps < 1 or threads < 1 or seed < 0:
        given = f"num_envs = {num_envs}, steps = {steps}, threads = {threads}, seed = {seed}"
        raise ValueError(f"check_vector_env: {given}; allowed: at least 2, 1, 1 and 0")
    if make_vector is None or make_scalar is None:
        make_vector, make_scalar = pacing_factories()
    with closing(make_vector(num_envs, 1)) as envs, closing(make_scalar()) as env:
        check_spaces(envs, env, num_envs)
        mode = declared_autoreset_mode(envs)
    run = Plan(num_envs, steps, seed)
    batch = run.record(make_vector(num_envs, 1))
    check_types(batch, num_envs)
    check_within_space(batch)
    check_not_reused(batch)
    check_episodes_end(batch)
    reference = run.record(SyncVectorEnv([make_scalar] * num_envs, autoreset_mode=mode))
    check_rows(batch, reference, "the scalar environment with the row's seed")
    check_final(batch, reference, mode)
    check_infos(batch, reference)
    check_seeds(make_vector, batch, run)
    check_batch_size(make_vector, batch, run)
    check_threads(make_vector, batch, run, threads)
    check_wild_actions(make_vector, run)


# What is recorded


@dataclass(frozen=True)
class Step:
    """What one ``step`` (or ``reset``, then without the middle three) returned, as it was at that moment."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    info: dict[str, Any]
    returned: dict[str, Any] = field(repr=False)
    """The very objects that were returned, by name, to see later whether they were written to again."""


@dataclass(frozen=True)
class Recorded:
    """A run of a vector environment: its spaces, and its reset and steps in order ``(T + 1,)``."""

    single_observation_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    steps: list[Step]

    def rows(self, t: int) -> Iterator[Any]:
        """The observations of step ``t``, row by row.

        Args:
            t: number of the step, from 0.
        """
        return iterate(self.observation_space, self.steps[t].observation)


@dataclass(frozen=True)
class Plan:
    """A run that can be repeated: row ``n`` always gets the same seed and the same actions, whatever the batch size."""

    num_envs: int
    steps: int
    seed: int

    def actions(self, envs: AnyVectorEnv) -> Iterator[Any]:
        """Batched actions, one for each step; a row's depend on its number and the step alone.

        Args:
            envs: the vector environment that takes them.
        """
        space = envs.single_action_space
        samples = []
        for n in range(self.num_envs):
            space.seed(self.seed + 7919 * n)
            samples.append([space.sample() for _ in range(self.steps)])
        for t in range(self.steps):
            out: Any = create_empty_array(space, self.num_envs)
            yield concatenate(space, [row[t] for row in samples], out)

    def record(self, envs: AnyVectorEnv, seed: Any = None) -> Recorded:
        """Reset ``envs`` with the plan's seed (or with ``seed``), step it through the plan's actions, close it.

        Args:
            envs: a fresh vector environment.
            seed: of the reset, instead of the plan's.
        """
        with closing(envs):
            observation, info = envs.reset(seed=self.seed if seed is None else seed)
            steps = [_kept((observation, None, None, None, info))]
            for action in self.actions(envs):
                steps.append(_kept(envs.step(action)))
            return Recorded(envs.single_observation_space, envs.observation_space, steps)


def _kept(returned: tuple[Any, ...]) -> Step:
    parts = dict(zip(("observation", "reward", "terminated", "truncated", "info"), returned, strict=True))
    return Step(**{name: _copied(part) for name, part in parts.items()}, returned=parts)


def _copied(value: Any) -> Any:
    """A deep copy of arrays in dicts and sequences; leaves are copied as they are."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value)
    if isinstance(value, np.ndarray):
        copy = value.copy()
        if value.dtype == object:
            for at, item in np.ndenumerate(value):
                copy[at] = _copied(item)
        return copy
    return value


# The checks


def declared_autoreset_mode(envs: AnyVectorEnv) -> AutoresetMode:
    """The autoreset mode in ``metadata``; absent or misspelled is an error, as wrappers and trainers depend on it.

    Args:
        envs: a vector environment.
    """
    mode = envs.metadata.get("autoreset_mode")
    _require(
        isinstance(mode, AutoresetMode) and mode is not AutoresetMode.DISABLED,
        f"metadata['autoreset_mode'] = {mode!r}; expected AutoresetMode.SAME_STEP or AutoresetMode.NEXT_STEP",
    )
    assert isinstance(mode, AutoresetMode)
    return mode


def check_spaces(envs: AnyVectorEnv, env: AnyEnv, num_envs: int) -> None:
    """The batch has the size asked for, rows have the scalar environment's spaces, and the batch spaces follow.

    Args:
        envs: the vector environment.
        env: its scalar environment.
        num_envs: the size asked for.
    """
    _require(envs.num_envs == num_envs, f"num_envs = {envs.num_envs}; expected the {num_envs} asked for")
    for kind in ("observation", "action"):
        single, batched = getattr(envs, f"single_{kind}_space"), getattr(envs, f"{kind}_space")
        scalar = getattr(env, f"{kind}_space")
        _require(single == scalar, f"single_{kind}_space = {single}; expected the scalar environment's {scalar}")
        expected = batch_space(single, num_envs)
        _require(batched == expected, f"{kind}_space = {batched}; expected batch_space(...) = {expected}")


def check_types(batch: Recorded, num_envs: int) -> None:
    """Rewards are float arrays ``(N,)``, terminations and truncations boolean ones, infos dicts.

    Args:
        batch: what the vector environment returned.
        num_envs: its number of rows.
    """
    for t, step in enumerate(batch.steps):
        _require(isinstance(step.info, dict), f"step {t}: info is a {type(step.info).__name__}; expected a dict")
        if t == 0:
            continue
        for name, kind in (("reward", np.floating), ("terminated", np.bool_), ("truncated", np.bool_)):
            value = getattr(step, name)
            _require(
                isinstance(value, np.ndarray) and value.shape == (num_envs,) and np.issubdtype(value.dtype, kind),
                f"step {t}: {name} is {_described(value)}; expected an array ({num_envs},) of {kind.__name__}",
            )
        _require(bool(np.isfinite(step.reward).all()), f"step {t}: reward = {step.reward}; expected finite numbers")


def check_within_space(batch: Recorded) -> None:
    """Every observation lies in the batched space, with its dtype.

    Args:
        batch: what the vector environment returned.
    """
    for t, step in enumerate(batch.steps):
        _require(
            step.observation in batch.observation_space,
            f"step {t}: the observation, {_described(step.observation)}, is not in {batch.observation_space}",
        )


def check_not_reused(batch: Recorded) -> None:
    """What was returned is not written to by later steps, so that a trainer may keep it without a copy.

    Args:
        batch: what the vector environment returned.
    """
    for t, step in enumerate(batch.steps):
        for name, now in step.returned.items():
            _require(_same(getattr(step, name), now), f"step {t}: the {name} returned changed later; expected a copy")


def check_episodes_end(batch: Recorded) -> None:
    """At least one episode ended, without which the autoreset has not been seen.

    Args:
        batch: what the vector environment returned.
    """
    ended = sum(int((s.terminated | s.truncated).sum()) for s in batch.steps[1:])
    _require(
        ended > 0, f"no episode ended in {len(batch.steps) - 1} steps; expected steps to be longer than an episode"
    )


def check_rows(batch: Recorded, reference: Recorded, name: str) -> None:
    """Row ``n`` equals row ``n`` of the reference byte for byte: observations, rewards, ends.

    Args:
        batch: the run that is checked.
        reference: the run that it must equal; it may have more rows.
        name: what messages call the reference.
    """
    for t, (step, other) in enumerate(zip(batch.steps, reference.steps, strict=True)):
        theirs = list(reference.rows(t))
        for n, ours in enumerate(batch.rows(t)):
            _require(
                _same(ours, theirs[n]),
                f"step {t}, row {n}: observation {ours} differs from {theirs[n]} of {name}; expected the same bytes",
            )
            if t == 0:
                continue
            for part in ("reward", "terminated", "truncated"):
                a, b = getattr(step, part)[n], getattr(other, part)[n]
                _require(
                    bool(a == b), f"step {t}, row {n}: {part} {a!r} differs from {b!r} of {name}; expected the same"
                )


def check_final(batch: Recorded, reference: Recorded, mode: AutoresetMode) -> None:
    """``final_obs`` and ``final_info`` come in the step that ends an episode, only there, and as Gymnasium's own.

    Args:
        batch: the run that is checked.
        reference: the same run of scalar environments.
        mode: the autoreset mode that the vector environment declares.
    """
    names = ("final_obs", "_final_obs", "final_info", "_final_info")
    for t, (step, other) in enumerate(zip(batch.steps, reference.steps, strict=True)):
        ended = t > 0 and mode is AutoresetMode.SAME_STEP and bool((step.terminated | step.truncated).any())
        for name in names:
            _require(
                (name in step.info) == ended,
                f"step {t}: info {'lacks' if ended else 'has'} {name!r} where {'an' if ended else 'no'} episode ended "
                f"in the same step; expected as declared: {mode}",
            )
            if ended:
                _require(
                    _same(step.info[name], other.info[name]),
                    f"step {t}: info[{name!r}] = {step.info[name]}; expected as SyncVectorEnv's {other.info[name]}",
                )


def check_infos(batch: Recorded, reference: Recorded) -> None:
    """Every entry of a row's scalar ``info`` is there, at its row and under the same mask.

    Args:
        batch: what the vector environment returned.
        reference: what scalar environments returned for the same actions.
    """
    for t, (step, other) in enumerate(zip(batch.steps, reference.steps, strict=True)):
        for key, theirs in other.info.items():
            mask = other.info.get(f"_{key}")
            if key.startswith("final_") or mask is None or isinstance(theirs, dict):
                continue
            _require(
                key in step.info and f"_{key}" in step.info,
                f"step {t}: info lacks {key!r} or its mask '_{key}'; expected what the scalar environment says",
            )
            ours, our_mask = step.info[key], step.info[f"_{key}"]
            _require(
                _same(our_mask, mask) and _same(np.asarray(ours)[mask], np.asarray(theirs)[mask]),
                f"step {t}: info[{key!r}] = {ours} under {our_mask}; expected {theirs} under {mask}",
            )


def check_seeds(make_vector: MakeVector, batch: Recorded, run: Plan) -> None:
    """The same seeds repeat a run, as a number and as a list; other seeds, and other rows, give other runs.

    Args:
        make_vector: makes the vector environment.
        batch: an earlier run of it.
        run: how that run was made.
    """
    check_rows(run.record(make_vector(run.num_envs, 1)), batch, "an earlier run with the same seed")
    listed = [run.seed + n for n in range(run.num_envs)]
    check_rows(run.record(make_vector(run.num_envs, 1), listed), batch, f"a run with seed={run.seed}, now {listed}")
    other = run.record(make_vector(run.num_envs, 1), run.seed + run.num_envs)
    alike = all(_same(x.observation, y.observation) for x, y in zip(batch.steps, other.steps, strict=True))
    _require(not alike, f"seeds from {run.seed + run.num_envs} on give the run of {run.seed}; expected another")
    swapped = run.record(make_vector(run.num_envs, 1), listed[1::-1] + listed[2:])
    _require(
        not _same(next(swapped.rows(0)), next(batch.rows(0))),
        f"row 0 starts alike with seeds {listed[1]} and {listed[0]}; expected a row's seed to be used",
    )


def check_batch_size(make_vector: MakeVector, batch: Recorded, run: Plan) -> None:
    """A row is the same in a smaller batch: rows neither share noise nor disturb each other.

    Args:
        make_vector: makes the vector environment.
        batch: an earlier run of it.
        run: how that run was made.
    """
    for num_envs in sorted({1, 2, run.num_envs - 1}):
        smaller = Plan(num_envs, run.steps, run.seed).record(make_vector(num_envs, 1))
        check_rows(smaller, batch, f"the same row in a batch of {run.num_envs}, now of {num_envs}")


def check_threads(make_vector: MakeVector, batch: Recorded, run: Plan, threads: int) -> None:
    """The number of threads changes nothing.

    Args:
        make_vector: makes the vector environment.
        batch: an earlier run of it with one thread.
        run: how that run was made.
        threads: number of threads that is compared with one.
    """
    check_rows(run.record(make_vector(run.num_envs, threads)), batch, f"a run with 1 thread, now {threads}")


def check_wild_actions(make_vector: MakeVector, run: Plan) -> None:
    """Actions outside the space, infinite or not-a-number are refused by ValueError or leave a sound environment.

    Args:
        make_vector: makes a fresh vector environment.
        run: seed and number of steps.
    """
    probe = make_vector(run.num_envs, 1)
    space = probe.action_space
    probe.close()
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return
    for wild in _FAR_OUTSIDE:
        with closing(make_vector(run.num_envs, 1)) as envs:
            envs.reset(seed=run.seed)
            action = np.zeros(space.shape, space.dtype)
            action[0] = wild
            try:
                envs.step(action)
            except (ValueError, gymnasium.error.InvalidAction):
                continue
            observation, reward, *_ = envs.step(np.zeros(space.shape, space.dtype))
            _require(
                observation in envs.observation_space and bool(np.isfinite(reward).all()),
                f"after an action of {wild} the environment returns observations {observation} and rewards {reward}; "
                "expected ValueError, or observations in the space and finite rewards",
            )


# Comparing


def _require(condition: bool, message: str) -> None:
    """Raise ``AssertionError``; not an ``assert``, which ``python -O`` leaves out."""
    if not condition:
        raise AssertionError(message)


def _same(a: Any, b: Any) -> bool:
    """Whether two structures are equal to the byte, dtypes and shapes included."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} of {value.dtype}: {_shortened(value)}"
    return f"a {type(value).__name__}"


def _shortened(value: NDArray[Any]) -> str:
    return np.array2string(value, threshold=20, edgeitems=2)
