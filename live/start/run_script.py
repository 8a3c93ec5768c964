"""Runs a script or a module in this process as the interpreter itself does.

It empties and uses the module ``__main__`` itself. So pickle, multiprocessing's spawn and debuggers find what they
expect there, to the end of the process. An exception passes through to the interpreter, which handles it as usual; only
our own frames are removed from its traceback first.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from types import TracebackType
from typing import Any

from paceenv.core.errors import InputError

_KEPT = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__", "__builtins__"}


def prepare_script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs ``python path arguments...``: a Python file, or a folder or archive with ``__main__.py``.

    Raises InputError if it cannot be read.

    Args:
        path: of the file, folder or archive.
        arguments: what the script finds in ``sys.argv`` after its own name.
    """
    folder = os.path.isdir(path) or (os.path.isfile(path) and get_importer(path) is not None)
    execute = _execute_folder if folder else _load(path)

    def run() -> None:
        sys.argv[:] = [path, *arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.path.abspath(path) if folder else os.path.dirname(os.path.realpath(path))
        _run(execute)

    return run


def prepare_module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs ``python -m name arguments...``.

    Args:
        name: of the module, with dots.
        arguments: what the module finds in ``sys.argv`` after its own name.
    """

    def run() -> None:
        sys.argv[:] = ["-m", *arguments]
        _run(lambda names: runpy._run_module_as_main(name))  # type: ignore[attr-defined]

    return run


def _execute_folder(names: dict[str, Any]) -> None:
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _load(path: str) -> Callable[[dict[str, Any]], None]:
    file = os.path.abspath(path)
    compiled = file.endswith(".pyc")
    loader = SourcelessFileLoader("__main__", file) if compiled else SourceFileLoader("__main__", file)
    try:
        content = loader.get_data(file)
    except OSError as error:
        raise InputError(f"script {path}: cannot be read: {error.strerror}; allowed: a Python file") from None

    def execute(names: dict[str, Any]) -> None:
        code: Any = loader.get_code("__main__") if compiled else compile(content, file, "exec", dont_inherit=True)
        names |= {"__file__": file, "__cached__": None, "__loader__": loader}
        exec(code, names)

    return execute


def _run(execute: Callable[[dict[str, Any]], None]) -> None:
    """Run in an empty ``__main__``."""
    names = vars(sys.modules["__main__"])
    for name in set(names) - _KEPT:
        del names[name]
    names |= {"__doc__": None, "__package__": None, "__spec__": None}
    try:
        execute(names)
    except SystemExit:
        raise
    except BaseException as error:
        _hide_our_frames(error)
        raise


def _hide_our_frames(error: BaseException) -> None:
    """Make the interpreter print ``error`` as it does for a script that was started directly."""
    hook, theirs = sys.excepthook, _after_ours(error.__traceback__)

    def print_theirs(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        sys.excepthook = hook
        if value is error:
            value, traceback = value.with_traceback(theirs), theirs
        hook(kind, value, traceback)

    sys.excepthook = print_theirs


def _after_ours(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_globals is globals():
        traceback = traceback.tb_next
    return traceback
