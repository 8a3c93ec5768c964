"""The command line of ``-m paceenv.live``: settings of the agent, then a script that runs as it does without it.

``paceenv live run`` has the same settings, and launches the ranks as well (``paceenv.live.start.run_command``).

The script or module runs in this process as the interpreter itself runs it: in the module ``__main__``, emptied. So
pickle, multiprocessing's spawn and debuggers find what they expect there, to the end of the process. An exception
passes through to the interpreter, which handles it as usual; only our own frames are removed from its traceback first.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from inspect import Parameter
from pathlib import Path
from pkgutil import get_importer
from types import TracebackType
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.live.options import ENVIRONMENT_KILL_FILE, OPTIONS, Option, Options, absolute_policy, make_options
from paceenv.live.start.attach_hook import attach_later
from paceenv.live.start.obstacles import obstacle_elsewhere

USER_ERROR = 2
_KEPT = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__", "__builtins__"}
HELP = """Run a training script with the agent attached, without a line changed in it.

\b
torchrun --nproc-per-node 8 -m paceenv.live train.py --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --out runs/live/mine train.py --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --out runs/live/mine -m package.train --lr 3e-4
torchrun --nproc-per-node 8 -m paceenv.live --mode canary --policy policy.safetensors train.py --lr 3e-4

paceenv live run --nproc-per-node 8 --out runs/live/mine train.py --lr 3e-4 launches the ranks by itself.

Begin with the first: it only observes, and reports at the end where the step went and which rank waits for which. Watch
it with paceenv live status DIR. Then go on to shadow (decides, never delays), canary (a switchback test: every rank
alternates paired blocks with and without pacing, and measures whether pacing pays) and active (paces nine of ten
blocks). Mode probe adds very small random delays, so that its trace shows what a delay does to the job.
Everything after the script's name belongs to the script. PACEENV_LIVE=off in the environment switches the agent off."""
POLICY_HELP = """Decides in modes shadow, canary and active; beside candidates one more. A policy file of paceenv
train; learned (the released one); both also with :preference=0.3. Or a rule: paper, adaptive,
static:mechanism=slack,threshold=0.02,window=0.4, or static:my-cluster.yaml for the pacing of a cluster config."""

application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def with_agent_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter ``mode`` and the ``**given`` of ``function`` by command-line options made from Options."""
    signature, options = inspect.signature(function, eval_str=True), {option.name: option for option in OPTIONS}
    parameters: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in options:
            parameters.append(_parameter(options.pop(name)))
        elif parameter.kind is Parameter.VAR_KEYWORD:
            parameters += map(_parameter, options.values())
        else:
            parameters.append(parameter)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _parameter(option: Option) -> Parameter:
    means = option.meaning
    text = f"{means.help} ({means.allowed})." if means.allowed else f"{means.help}."
    text += f" Default: {means.unset}." if means.unset else ""
    flag = (f"--{option.name.replace('_', '-')}",) if option.type is bool else ()  # without a --no-... beside it
    default = typer.Option(option.default, *flag, help=text, show_default=not means.unset and not flag)
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=option.type)


Script = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The training script and its arguments.")
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")]
PolicyName = Annotated[str | None, typer.Option(help=" ".join(POLICY_HELP.split()))]


@application.command(help=HELP, context_settings={"allow_interspersed_args": False})
@with_agent_options
def launch(
    *, script: Script, module: Module = False, mode: str, policy: PolicyName = None, **given: Any
) -> Callable[[], None]:
    name, *arguments = script
    given |= {"mode": mode, "job": given["job"] or (name if module else Path(name).stem)}
    options = make_options(given)
    if options.strict:
        refuse(options, obstacle_elsewhere(options, policy))
    given |= {"out": options.out, "kill_file": options.kill_file}  # absolute: the script may change the folder
    if os.environ.get(ENVIRONMENT_KILL_FILE):
        os.environ[ENVIRONMENT_KILL_FILE] = str(options.kill_file or "")
    run = (prepare_module if module else prepare_script)(name, arguments)
    if options.mode == "off" != mode:  # the kill switch: as little as possible happens
        return run
    attach_later(policy=absolute_policy(policy), **given)
    return run


def refuse(options: Options, why: str) -> None:
    """Raise InputError where something stands in the way of the mode."""
    if why:
        raise InputError(f"mode {options.mode} cannot be entered: {why}")


def prepare_script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs ``python path arguments...``: a Python file, or a folder or archive with ``__main__.py``.

    Raises InputError if it cannot be read.
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
    """A function that runs ``python -m name arguments...``."""

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
    except BaseException as error:
        sys.last_value = error  # for the agent's page; the interpreter does so, but for SystemExit
        if not isinstance(error, SystemExit):
            _hide_our_frames(error)
        if not isinstance(error, SystemExit) or error.code:
            _tell_torchrun(error)
        raise


def _tell_torchrun(error: BaseException) -> None:
    """Leave the error for torchrun's report, in the form of its own ``@record``, unless the script has done so.

    The time is rounded up: a rank that was killed leaves no file, and comes before those that lost it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None and not os.path.exists(file):
        stack = "".join(traceback.format_exception(type(error), error, _after_ours(error.__traceback__)))
        extra = {"py_callstack": stack, "timestamp": str(math.ceil(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": repr(error), "extraInfo": extra}}))


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


def main() -> None:
    """Entry point of ``python -m paceenv.live``; exit code 2 for a user's mistake, before the script starts."""
    try:
        command = typer.main.get_command(application)
        run = command.main(sys.argv[1:], prog_name="python -m paceenv.live", standalone_mode=False)
    except Exception as error:
        explain = getattr(error, "format_message", None)  # only errors of usage have one
        if explain is None and not isinstance(error, InputError):
            raise
        text = str(error) if explain is None else f"{explain()} See python -m paceenv.live --help"
        print(f"paceenv: error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if callable(run):  # else it was --help
        run()
