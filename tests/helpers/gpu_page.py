"""What the tests on a GPU found, as one page of Markdown for ``docs/evidence/gpu.md``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def gpu_page(reports: Iterable[Any], facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        reports: pytest's, one for each test; what a test recorded with ``record_property`` is its measurement.
        facts: about the device and the versions.
    """
    lines = ["| what | |", "| --- | --- |", *(f"| {what} | {fact} |" for what, fact in facts.items()), ""]
    lines += ["| check | result | measured, or why not |", "| --- | --- | --- |"]
    lines += [f"| {_words(r.nodeid)} | {_result(r.outcome)} | {_measured(r)} |" for r in reports]
    return "\n".join(lines) + "\n"


def device_facts() -> dict[str, str]:
    """Device, and the versions that matter."""
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, compute capability {major}.{minor}",
        "PyTorch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _words(nodeid: str) -> str:
    name, _, case = nodeid.rpartition("::")[2].removeprefix("test_").partition("[")
    return name.replace("_", " ") + (f": {case.removesuffix(']')}" if case else "")


def _result(outcome: str) -> str:
    return f"**{outcome}**" if outcome == "failed" else outcome


def _measured(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if report.outcome == "failed":
        return re.sub(r"\s+", " ", str(report.longrepr))[-200:].replace("|", "/")
    return "; ".join(str(value) for _, value in report.user_properties)
