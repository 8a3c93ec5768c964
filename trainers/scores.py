"""``SCORES.md`` and ``SCORES.json``: every committed suite, every policy that ships, rebuilt by one command."""

from __future__ import annotations

import json
from pathlib import Path

from paceenv import configs, output
from trainers import report
from trainers.config import load_suite
from trainers.evaluate import best_static, evaluate, search_size

HEADER = """# Scores

Rebuilt by `make scores` from the committed configs. Throughput against passive, mean over seeds with 95 % bootstrap
intervals, paired on common random numbers; a CV is never a result by itself. The learned policy is trained by
`make demo` and compared there; a released one comes with its own issue.
"""


def rebuild(out: Path) -> None:
    """Evaluate the hand-written policies and the bound on every suite in ``configs/suites`` and write both files."""
    parts, rows = [HEADER], []
    for name in configs.names("suites"):
        suite = load_suite(name)
        with output.progress(f"{name}: best static setting", search_size(suite)) as done:
            static = best_static(suite, on_done=done)
        policies = [static, "static", "paper", "adaptive", "clairvoyant"]
        with output.progress(f"{name}: compare", len(suite.cases) * (len(policies) + 1)) as done:
            comparison = evaluate(policies, suite, on_done=done)
        parts.append(report.markdown(comparison))
        rows += report.as_json(comparison)
    configs.write_text(out / "SCORES.md", "\n".join(parts))
    configs.write_text(out / "SCORES.json", json.dumps(rows, indent=1) + "\n")
    output.say(f"wrote {out / 'SCORES.md'} and {out / 'SCORES.json'}")
