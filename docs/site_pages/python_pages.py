"""The public Python modules, each with its signatures and docstrings, for Sphinx's autodoc."""

from __future__ import annotations

PUBLIC = {
    "Environment": (
        "paceenv.envs.registration",
        "paceenv.envs.pacing_env",
        "paceenv.trainers.training.training_envs",
    ),
    "Policies": (
        "paceenv.policies.base",
        "paceenv.policies.names",
        "paceenv.policies.rules",
        "paceenv.policies.learned",
        "paceenv.policies.from_torch",
        "paceenv.policies.policy_file",
        "paceenv.policies.rollout",
    ),
    "Comparison and sweeps": (
        "paceenv.trainers.evaluation.evaluate",
        "paceenv.trainers.evaluation.suites",
        "paceenv.trainers.sweep.trainables",
    ),
    "Simulator": (
        "paceenv.sim.cluster.model",
        "paceenv.sim.cluster.quantity",
        "paceenv.sim.cluster.derive",
        "paceenv.sim.engine.simulator",
    ),
    "Pacing, signals, reward": (
        "paceenv.core.pacing",
        "paceenv.core.signals",
        "paceenv.core.metrics",
        "paceenv.core.limits",
        "paceenv.core.timing",
    ),
    "Traces and diagnosis": (
        "paceenv.core.trace",
        "paceenv.core.lateness.watch",
        "paceenv.importers.inputs",
        "paceenv.diagnosis.diagnose",
        "paceenv.calibration.posterior",
    ),
    "Live jobs": ("paceenv.live.agent",),
    "Errors": ("paceenv.core.errors",),
}
"""The modules that programs of others may import, by subject; what is not here may change without notice."""


def _left_out(name: str) -> list[str]:
    """The environment's docstring is Markdown, as Gymnasium's are, and has a page of its own."""
    return ["   :exclude-members: PacingEnv"] if name == "paceenv.envs.pacing_env" else []


def modules() -> list[str]:
    return [name for names in PUBLIC.values() for name in names]


def python_api() -> str:
    """A section for each subject, and in it one for each module."""
    lines = []
    for subject, names in PUBLIC.items():
        lines += [f"## {subject}", ""]
        for name in names:
            lines += [
                f"### {name}",
                "",
                "```{eval-rst}",
                f".. automodule:: {name}",
                "   :members:",
                *_left_out(name),
                "```",
                "",
            ]
    return "\n".join(lines)


MAKERS = {"python-api": python_api}
