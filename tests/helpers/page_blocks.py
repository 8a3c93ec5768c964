"""The code blocks of a page of documentation, and the programs that its commands name, as tests run them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NOT_RUN = "<!-- not run by the tests: "
"""Begins the line above blocks that the tests leave out; it holds up to the next heading."""
TOOLS = {
    "torchrun": '"{python}" -m torch.distributed.run "$@"',
    "python": '"{python}" "$@"',
    "paceenv": '"{python}" -c "from paceenv.cli.application import main; main()" "$@"',
}


class Block(NamedTuple):
    """A fenced block: its language, its text, and whether the page says that the tests leave it out."""

    language: str
    text: str
    is_run: bool


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found, is_run = [], True
    parts = r"^(#+ [^\n]*)$|^(<!-- [^\n]* -->)$|^```([^\n`]*)\n(.*?)^```$"
    for match in re.finditer(parts, page, re.MULTILINE | re.DOTALL):
        heading, comment, language, text = match.groups()
        if heading:
            is_run = True
        elif comment:
            is_run = is_run and not comment.startswith(NOT_RUN)
        elif not language.startswith("{"):  # a directive of the site
            found.append(Block(language, text, is_run))
    return found


def differing_lines(shown: str, printed: str) -> list[str]:
    """Lines of a block of output that nothing printed comes near to: other words, or a number far off.

    Numbers may differ by a quarter or by 3: another processor rounds differently, and trainings amplify it. Three dots
    stand for anything on the line.

    Args:
        shown: the block.
        printed: all that the page's commands printed.
    """
    number = r"[-+]?\d[\d,]*(?:\.\d+)?"
    differing = []
    for line in filter(str.strip, shown.splitlines()):
        words = re.split(number, line.strip().removesuffix("...").strip())
        escaped = [re.escape(word).replace(re.escape("..."), r"[^\n]*") for word in words]
        pattern = f"({number})".join(re.sub(r"(?:\\?\s)+", r"\\s+", word) for word in escaped)
        said = [float(found.replace(",", "")) for found in re.findall(number, line)]
        for match in re.finditer(pattern, printed):
            found = [float(group.replace(",", "")) for group in match.groups()]
            if all(abs(a - b) <= max(3.0, 0.25 * abs(b)) for a, b in zip(found, said, strict=True)):
                break
        else:
            differing.append(line.strip())
    return differing


def lay_out_tools(folder: Path) -> dict[str, str]:
    """Put stand-ins of the named programs into ``folder``/bin, each in this interpreter; returns the environment."""
    (folder / "bin").mkdir()
    for name, body in TOOLS.items():
        tool = folder / "bin" / name
        tool.write_text("#!/bin/bash\n" + body.replace("{python}", sys.executable) + "\n")
        tool.chmod(0o755)
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{folder}"}
    return os.environ | paths | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
