"""The documentation does what it says: its blocks run, its commands exist, its reference is made from the code, and the
recipes of docs/how-to/recipes.md find the slow rank."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import commands
import pytest
import yaml
from commands import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import site_pages
from site_pages import command_pages, config_pages

from paceenv.core import pacing

DOCS = sorted((ROOT / "docs").rglob("*.md"))
RUN = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
"""Pages of which every block runs, or says why it does not."""
QUICK = {"index.md"}
TRAINED = "paceenv train demo"
"""What the page on training asks for takes a minute: here less, so that its numbers are others."""
COMMANDS = dict(command_pages.commands())
FACE = (
    *("paceenv/envs/pacing_env.py", "paceenv/envs/registration.py"),
    *("paceenv/core/pacing.py", "paceenv/core/signals.py", "paceenv/core/trace.py"),
    *("policies/base.py", "policies/policy_file.py", "live/agent.py"),
)
"""Environments, the four contracts, and what attaches to a job: every parameter is described. Inside, a docstring
says what the name does not."""
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


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[] if p.name in QUICK else pytest.mark.slow, id=p.stem) for p in RUN]
)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    environ = lay_out_tools(tmp_path)
    script = []  # one shell for the page, as its reader has: a job of one block may be awaited in a later one
    for k, block in enumerate(blocks(page.read_text())):
        assert block.language in {"sh", "python", "text"}, block.text
        if not block.is_run or block.language == "text":
            continue
        if block.language == "sh":
            script.append(block.text)
        else:
            named = re.match(r"# file: (\S+)\n", block.text)
            path = tmp_path / (named[1] if named else f"block{k}.py")
            path.write_text(block.text)
            script += [] if named else [f"python {path.name}\n"]
    whole = "".join(script)
    (tmp_path / "page.sh").write_text(whole.replace(TRAINED, f"{TRAINED} --set total_timesteps=16000"))
    ended = commands.run(["bash", "-ex", "page.sh"], cwd=tmp_path, env=environ, deadline_s=900.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if page.stem != "deploy" and TRAINED not in whole:  # the former times a real job
        shown = [block.text for block in blocks(page.read_text()) if block.is_run and block.language == "text"]
        assert [line for text in shown for line in differing_lines(text, ended.stdout)] == []


def test_the_glossary_says_what_each_rule_compares() -> None:
    glossary = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    for one in pacing.DEFINITIONS:
        assert f"| `{one.name}` | {one.compares} |" in glossary


def test_the_table_of_versions_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(re.fullmatch(r"([a-z0-9-]+)[^>]*(.*)", one).groups() for extra in  # type: ignore[union-attr,misc]
                 project["optional-dependencies"].values() for one in extra)  # fmt: skip
    asked["python"] = project["requires-python"]
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]+) \|$",
                      (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) == 5
    for name, least, below, tested in rows:
        assert asked[name] == f">={least}" + (f",<{below}" if below else ""), name
        assert f"\n{name}=={tested}\n" in pins or (name == "python" and f"# linux, python {tested}." in pins), name


def test_every_command_on_every_page_exists_with_its_options() -> None:
    seen, wrong = 0, []
    for page in [*RUN[:1], *DOCS]:
        shell = "".join(block.text for block in blocks(page.read_text()) if block.language == "sh")
        for line in re.findall(r"^ *(paceenv [a-z].*)$", re.sub(r"\\\n", " ", shell), re.MULTILINE):
            words, seen = shlex.split(line.partition(" -- ")[0], comments=True), seen + 1
            length = 3 if " ".join(words[:3]) in COMMANDS else 2
            command = COMMANDS.get(" ".join(words[:length]))
            options = {name for p in getattr(command, "params", []) for name in (*p.opts, *p.secondary_opts)}
            if "run" in getattr(command, "commands", {}):  # the word may be left out
                options |= {name for p in command.commands["run"].params for name in p.opts}
            given = {word.partition("=")[0] for word in words[length:] if re.match(r"--?[a-z]", word)} - {"--help"}
            if not getattr(command, "context_settings", {}).get("allow_interspersed_args", True):
                given = set()  # it hands them on to a launcher
            if command is None or given - options:
                wrong.append(f"{page.relative_to(ROOT)}: {line}: {given - options if command else 'no such command'}")
    assert seen > 60
    assert wrong == []


def test_every_mark_is_made_and_everything_made_is_on_a_page() -> None:
    marks = [name for page in DOCS for name in site_pages.MARK.findall(page.read_text())]
    assert sorted(marks) == sorted(site_pages.MAKERS)


def test_every_option_of_every_command_is_described() -> None:
    without = [
        (name, parameter.name)
        for name, command in COMMANDS.items()
        for parameter in command.params
        if parameter.name != "help" and not parameter.help and not getattr(parameter, "hidden", False)
    ]
    assert without == []


def test_every_config_key_has_a_meaning() -> None:
    without = {
        f"{one.__name__}.{key}"
        for model, _, _ in config_pages.KINDS.values()
        for _, one, rows in config_pages.keys(model)
        for key, _, _, _, meaning in rows
        if not meaning
    }
    assert without == set()


def test_the_readme_reads_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 620


def test_the_map_leads_from_lines_of_the_readme_to_files() -> None:
    page = (ROOT / "docs" / "explanation" / "structure.md").read_text()
    readme = (ROOT / "README.md").read_text().replace("`", "")
    rows = re.findall(r"^\| (.+) \| (`.+) \|$", page.partition("## One import root")[0], re.MULTILINE)
    assert len(rows) > 10
    assert [said for said, _ in rows if said.replace("`", "") not in readme] == []
    assert [name for _, files in rows for name in re.findall("`(.+?)`", files) if not (ROOT / name).exists()] == []


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Every public function and method of a module with a docstring: its name, itself, and what is said of it."""
    for owner in ast.parse(path.read_text()).body:
        body = owner.body if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_") else [owner]
        of_class = (ast.get_docstring(owner) or "") if isinstance(owner, ast.ClassDef) else ""
        for one in body:
            if isinstance(one, ast.FunctionDef) and (not one.name.startswith("_") or one.name == "__init__"):
                said = (ast.get_docstring(one) or "") + (of_class if one.name == "__init__" else "")
                if said and not any("overload" in ast.unparse(name) for name in one.decorator_list):
                    yield f"{path.name}: {one.name}", one, said


def test_every_parameter_of_the_public_face_is_described() -> None:
    """``name: meaning``, as under ``Args:``, or as a point of a list."""
    found = [one for name in FACE for one in functions(ROOT / name)]
    assert len(found) > 30
    without = [
        (name, parameter.arg)
        for name, function, said in found
        for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if parameter.arg not in {"self", "cls"}
        and not re.search(rf"^\s*(?:\* )?`{{0,2}}\*{{0,2}}{parameter.arg}`{{0,2}}:\s", said, re.MULTILINE)
    ]
    assert without == []


RECIPES = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
SECTIONS = {part.partition("\n")[0]: blocks(part) for part in re.split(r"^## ", RECIPES, flags=re.MULTILINE)[1:]}
SHELL = [block.text for block in blocks(RECIPES) if block.language == "sh"]
FILES = [(name[1], block.text) for block in blocks(RECIPES)
         if (name := re.search(r"^# file: (\S+)$", block.text, re.MULTILINE))]  # fmt: skip


def test_every_recipe_of_the_table_is_there_and_its_blocks_parse() -> None:
    rows = re.findall(r"^\| \[.*?\]\(#([\w.-]+)\)", RECIPES, re.MULTILINE)
    assert set(rows) == {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in SECTIONS}
    assert len(dict(FILES)) == len(FILES)
    for name, text in FILES:
        if name.endswith(".py"):
            compile(text, name, "exec")
    for text in (*SHELL, *(text for name, text in FILES if name.endswith(".sbatch"))):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_every_option_of_the_recipes_is_one_of_the_agent() -> None:
    from paceenv.live.options import OPTIONS

    known = {f"--{option.name.replace('_', '-')}" for option in OPTIONS} | {"--policy", "--wait"}
    manifest = yaml.safe_load(dict(FILES)["pytorchjob.yaml"])
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        *options, script = container["args"]
        assert {option.partition("=")[0] for option in options} <= known
        assert script == "train.py"
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert all(path.startswith(tuple(mounts)) for path in re.findall(r"=(/\S+)", " ".join(options)))
    asked = set()
    for line in "".join(SHELL).replace("\\\n", "").splitlines():
        agent = line.partition("-m paceenv.live ")[2].partition(" -m ")[0]
        asked |= set(re.findall(r"(?:^| )(--[\w-]+)", agent))
    assert {"--out", "--kill-file"} <= asked <= known


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["torchrun", "Hugging Face Trainer", "Lightning"])
def test_a_recipe_names_the_slow_rank(heading: str, tmp_path: Path) -> None:
    """Rank 1, and it alone, is late by about the 20 ms that it sleeps; by the launcher, and by a trainer's callback."""
    environ = lay_out_tools(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for name, text in FILES:
        (tmp_path / name).write_text(text.replace("29500", port))
    for command in (block.text for block in SECTIONS[heading] if block.language == "sh"):
        ended = commands.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environ)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "rank 1" in ended.stdout
        (folder,) = re.findall(r"^cat (\S+)/summary.txt$", command, re.MULTILINE)
        page = (tmp_path / folder / "summary.txt").read_text()
        (late_ms,) = re.findall(r"^  rank 1 \(.*\) is late by ([\d.]+) ms", page, re.MULTILINE)
        assert 16 <= float(late_ms) <= 30, page
        assert page.count("is late by") == 1, page
        assert len(list((tmp_path / folder).glob("*/rank*.json"))) == 2
