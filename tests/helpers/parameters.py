"""Which parameters of public functions are described, from the source alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
ENTRY = re.compile(r"^\s*(?:\* )?`{0,2}\*{0,2}(\w+)`{0,2}:\s", re.MULTILINE)
"""``name: meaning``, as under ``Args:``, or as a point of a list in Markdown."""


@dataclass(frozen=True)
class Described:
    """A public function or method.

    Attributes:
        name: file, class and function.
        parameters: names, without ``self`` and ``cls``.
        missing: those that nothing describes.
        documented: whether it has a docstring of its own; what overrides another's method need not.
    """

    name: str
    parameters: list[str]
    missing: list[str]
    documented: bool


def functions(path: Path) -> Iterator[Described]:
    """Every public function and method of a module that takes parameters."""
    module = ast.parse(path.read_text())
    helps = {
        target.id
        for node in module.body
        if isinstance(node, ast.Assign) and "help=" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            of_class = ast.get_docstring(node) or ""
            for one in node.body:
                if isinstance(one, Function) and (not one.name.startswith("_") or one.name == "__init__"):
                    made = of_class if one.name == "__init__" else ""
                    yield from _described(one, f"{path}: {node.name}.{one.name}", made, helps)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield from _described(node, f"{path}: {node.name}", "", helps)


def _described(function: Function, name: str, of_class: str, helps: set[str]) -> Iterator[Described]:
    own = ast.get_docstring(function) or ""
    found = set(ENTRY.findall(f"{own}\n{of_class}"))
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    parameters = [one for one in arguments if one.arg not in {"self", "cls"}]
    if not parameters or any("overload" in ast.unparse(one) for one in function.decorator_list):
        return
    missing = [one.arg for one in parameters if one.arg not in found and not _has_help(one.annotation, helps)]
    yield Described(name, [one.arg for one in parameters], missing, bool(own or of_class))


def _has_help(annotation: ast.expr | None, helps: set[str]) -> bool:
    """Whether the command line describes it: ``Annotated[..., typer.Option(help=...)]``, or a name for that."""
    text = "" if annotation is None else ast.unparse(annotation)
    return "help=" in text or text in helps
