"""The environment's reference: tables of actions, observations, rewards, info and options, from their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceenv.core import pacing, signals
from paceenv.envs.episode_batch import DEFAULT_CLUSTER, DEFAULT_MECHANISMS


class Entry(NamedTuple):
    """One key of ``info``, of a reset's options, or a mode, with what it means."""

    name: str
    meaning: str
    unit: str = ""
    """Unit or type."""
    present: str = ""
    """Where it is there, or who takes it."""


INFO = (
    Entry("cluster", "number of the present episode's cluster in `env.unwrapped.cluster_names`", "integer",
          "reset and step"),
    Entry("cluster_name", "its name", "string", "reset and step, with `names_in_info`"),
    Entry("step_mean_s", "mean step time of the interval", "s", "step"),
    Entry("step_cv", "standard deviation of the step time / mean step", "ratio", "step"),
    Entry("throughput_ratio", "ideal step / mean step, less what failures undid", "ratio", "step"),
    Entry("reference_step_s", "ideal step: every rank equal and every link free", "s", "step"),
    Entry("cv_weight", "weight of the variation in the reward", "ratio", "step"),
    Entry("passive_step_mean_s", "mean step time of the unpaced twin", "s", "step, with a twin"),
    Entry("passive_reward", "raw reward of the unpaced twin", "ratio", "step, with a twin"),
    Entry("gain", "mean step of the twin / mean step, less 1", "ratio", "step, with a twin"),
)  # fmt: skip
"""What ``info`` holds, in its order."""

OPTIONS = (
    Entry("cluster", "the episodes that start now run there: a name, a file or a `Cluster`", "as the argument", "both"),
    Entry("reset_mask", "only these rows start anew", "boolean array `(num_envs,)`", "vector environment"),
)
"""What ``reset(options=...)`` takes; others are refused."""

AUTORESET = (
    Entry("NEXT_STEP", "the step after an end starts the next episode: reward 0, its action counts for nothing"),
    Entry("SAME_STEP", "the step that ends an episode returns the next one's first observation; the last one is in "
          "`info['final_obs']`, its info in `info['final_info']`"),
    Entry("DISABLED", "the caller resets ended rows with `options={'reset_mask': ...}`; a step before that is refused"),
)  # fmt: skip
"""Modes of ``PacingVectorEnv``, the default first."""


def info_table() -> str:
    """:data:`INFO` as a Markdown table."""
    return _table(("Key", "Meaning", "Unit", "Where"), [(f"`{e.name}`", e.meaning, e.unit, e.present) for e in INFO])


def option_table() -> str:
    """:data:`OPTIONS` as a Markdown table."""
    rows = [(f"`{e.name}`", e.meaning, e.unit, e.present) for e in OPTIONS]
    return _table(("Option", "Meaning", "Value", "Environment"), rows)


def autoreset_table() -> str:
    """:data:`AUTORESET` as a Markdown table."""
    return _table(("Mode", "After the end of an episode"), [(f"`{e.name}`", e.meaning) for e in AUTORESET])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def by_name() -> dict[str, str]:
    """What the environment's docstring names, in the order in which it is to be replaced: tables and defaults."""
    return {
        "ACTION_TABLE": pacing.action_table(),
        "MECHANISM_TABLE": pacing.mechanism_table(),
        "OBSERVATION_TABLE": signals.table(),
        "INFO_TABLE": info_table(),
        "OPTION_TABLE": option_table(),
        "AUTORESET_TABLE": autoreset_table(),
        "DEFAULT_CLUSTER": DEFAULT_CLUSTER,
        "DEFAULT_MECHANISM": DEFAULT_MECHANISMS[0],
        "SIGNALS + 1": str(signals.SIGNALS + 1),
        "SIGNALS": str(signals.SIGNALS),
    }
