"""Data sets in Minari's format: written to and read from a folder of this machine; nothing is uploaded or fetched."""

from __future__ import annotations

import copy
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError, needs, out_of_range
from paceenv.trainers.offline.episodes import Episode

FOLDER_VARIABLE = "MINARI_DATASETS_PATH"
"""Minari's own variable for the folder of all data sets."""
_ID = re.compile(r"[\w-]+(/[\w-]+)*-v\d+")
FORMAT = "parquet"
"""Of the formats that Minari offers the one that needs no library beyond ours."""


@dataclass(frozen=True)
class Transitions:
    """A data set as arrays, one row a control interval of N in all; no episode has a terminal state.

    Attributes:
        view_NO: observations, ``(N, O)``.
        action_NA: normalised actions, ``(N, A)``.
        reward_N: rewards.
        next_view_NO: observations after the interval, ``(N, O)``.
        mechanisms: those that the actions set.
        record: of the data set.
    """

    view_NO: NDArray[np.float32]
    action_NA: NDArray[np.float32]
    reward_N: NDArray[np.float32]
    next_view_NO: NDArray[np.float32]
    mechanisms: tuple[str, ...]
    record: Mapping[str, Any]


@contextmanager
def _minari(folder: Path | None) -> Iterator[Any]:
    """Minari, working in a folder; None: in its own (``MINARI_DATASETS_PATH`` or ``~/.minari/datasets``)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an author's name and e-mail
        try:
            import minari
        except ImportError:
            raise needs("a data set", "minari", "offline") from None
        before = os.environ.get(FOLDER_VARIABLE)
        if folder is not None:
            os.environ[FOLDER_VARIABLE] = str(folder.resolve())
        try:
            yield minari
        finally:
            if folder is not None:
                os.environ.pop(FOLDER_VARIABLE)
                if before is not None:
                    os.environ[FOLDER_VARIABLE] = before


def write_dataset(
    name: str,
    episodes: Sequence[Episode],
    mechanisms: Sequence[str],
    *,
    description: str,
    env: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Path:
    """Write a data set, whole or not at all; returns its folder.

    Args:
        name: Minari's id, such as ``paceenv/two-jobs-random-v0``.
        episodes: at least one.
        mechanisms: those that the actions set.
        description: in words, for the metadata.
        env: arguments of ``paceenv/Pacing-v0`` with which Minari can make the environment again; None: there is none.
        folder: of all data sets; None: Minari's own.

    Raises:
        InputError: a name that Minari does not take, or that exists.
    """
    if not _ID.fullmatch(name):
        raise out_of_range("name", name, "letters, digits, - and _, with a version: paceenv/two-jobs-v0", "data set")
    if not episodes:
        raise InputError(f"data set {name}: no episode; allowed: at least one")
    spaces = {
        "observation_space": gymnasium.spaces.Box(signals.LOW, signals.HIGH, (signals.SIGNALS,), np.float32),
        "action_space": gymnasium.spaces.Box(-1.0, 1.0, (2 * len(mechanisms),), np.float32),
    }
    with _minari(folder) as minari:
        from minari.data_collector.episode_buffer import EpisodeBuffer
        from minari.storage import get_dataset_path

        place = Path(get_dataset_path(name))
        if place.exists():
            raise InputError(f"data set {name}: {place} exists; allowed: another name or version")
        spec = None
        if env is not None:
            import paceenv.envs  # noqa: F401 (registers it)

            spec = copy.deepcopy(gymnasium.spec("paceenv/Pacing-v0"))  # the original is the registry's own
            spec.kwargs = dict(env)
        try:
            found = minari.create_dataset_from_buffers(
                name, [_buffer(EpisodeBuffer, e) for e in episodes], env=spec, data_format=FORMAT,
                algorithm_name=", ".join(dict.fromkeys(str(e.record["behaviour"]) for e in episodes)),
                description=description, requirements=["paceenv"], **spaces,
            )  # fmt: skip
            found.storage.update_metadata(
                {
                    "observation_schema": signals.SCHEMA,
                    "observation_names": list(signals.NAMES),
                    "mechanisms": list(mechanisms),
                    "reward": str(episodes[0].record["reward"]),
                }
            )
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return place


def _buffer(kind: Any, episode: Episode) -> Any:
    intervals = len(episode.reward_K)
    ends = [False] * (intervals - 1) + [True]
    return kind(
        seed=episode.record.get("seed"),
        options=dict(episode.record),
        observations=episode.view_KO,
        actions=episode.action_KA,
        rewards=episode.reward_K.tolist(),
        terminations=[False] * intervals,
        truncations=ends,
    )


def read_dataset(name: str, folder: Path | None = None) -> Transitions:
    """Read a data set of this machine as arrays.

    Args:
        name: Minari's id.
        folder: of all data sets; None: Minari's own.

    Raises:
        InputError: it is not there, or is not of this version's observations and actions.
    """
    with _minari(folder) as minari:
        try:
            data = minari.load_dataset(name, download=False)
        except (FileNotFoundError, ValueError, KeyError, AssertionError) as error:
            local = ", ".join(sorted(minari.list_local_datasets())) or "none"
            raise InputError(f"data set {name}: cannot be read ({error}); on this machine: {local}") from None
        record = data.storage.metadata
        mechanisms = tuple(record.get("mechanisms", ()))
        if record.get("observation_schema") != signals.SCHEMA or not {*mechanisms} <= {*pacing.MECHANISMS}:
            schema = record.get("observation_schema")
            raise InputError(
                f"data set {name}: observations of {schema}; allowed: {signals.SCHEMA}, by paceenv dataset"
            )
        episodes = list(data.iterate_episodes())
    return Transitions(
        np.concatenate([e.observations[:-1] for e in episodes]).astype(np.float32),
        np.concatenate([e.actions for e in episodes]).astype(np.float32),
        np.concatenate([e.rewards for e in episodes]).astype(np.float32),
        np.concatenate([e.observations[1:] for e in episodes]).astype(np.float32),
        mechanisms,
        record,
    )
