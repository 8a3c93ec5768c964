"""``paceenv live run``: one command that launches the ranks of a node with the agent, or becomes one of them.

Options of torchrun and of the agent may be mixed; the first word that is no option is the script, and all after it is
the script's. The process is then replaced: by torchrun, whose ranks find the agent in their environment, or by the
script itself where a launcher has started this process as a rank already. So signals, exit codes, tracebacks, pickles
and ``__main__`` are theirs. ``-m paceenv.live`` is the same command for a process that is to run the script itself.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand

from paceenv.core.errors import InputError, needs, out_of_range
from paceenv.live.options import DECIDING, KILL_SWITCH, OPTIONS, absolute_policy, make_options
from paceenv.live.start.attach_hook import hand_down

POLICY_HELP = """Decides in modes shadow, canary and active; beside candidates one more. A policy file of paceenv
train; learned (the released one); both also with :preference=0.3. Or a rule: paper, adaptive,
static:slack=0.02/0.4 (threshold/window), or static:my-cluster.yaml for the pacing of a cluster config."""
HELP = """Run a training script with the agent attached, without a line changed in it.

Begin with the first example: it only observes, and reports at the end where the step went and which rank waits for
which. Watch it with paceenv live status DIR. Then go on to shadow (decides, never delays), canary (a switchback test:
every rank alternates paired blocks with and without pacing, and measures whether pacing pays) and active (paces nine of
ten blocks). Mode probe adds very small random delays, so that its trace shows what a delay does to the job.

paceenv live run takes the options of torchrun (--nnodes, --nproc-per-node, --rdzv-endpoint, ...; all of them: torchrun
--help) and those below, in any order, before the script. Without --nproc-per-node: a rank for each GPU, or one rank. In
a process that torchrun, srun or an operator has started as a rank it runs the script in place, as -m paceenv.live does
everywhere; options of torchrun are not allowed there. Everything after the script's name belongs to the script. Ends
with the exit code of the job, or with 2 for a mistake in the command line, before anything has started.
PACEENV_LIVE=off in the environment switches the agent off.

Examples:

paceenv live run --nproc-per-node 8 train.py --lr 3e-4

paceenv live run --nproc-per-node 8 --out runs/mine --mode shadow --policy learned train.py --lr 3e-4

srun --ntasks-per-node 8 paceenv live run --out runs/mine train.py --lr 3e-4

torchrun --nproc-per-node 8 -m paceenv.live --out runs/mine train.py --lr 3e-4"""
IN_PLACE = "in place"
"""The context's object where this process runs the script itself, whatever its environment says."""
SETTINGS = {"allow_interspersed_args": False}
_SPLIT = "paceenv.live.start.split"
_RENDEZVOUS = (
    *("standalone", "nnodes", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    *("master-addr", "master-port"),
)
"""Options of torchrun that say how the ranks find each other."""


class Split(NamedTuple):
    """A command line in its parts: options of torchrun, those of the agent, and the script with its arguments."""

    launcher: list[str]
    agent: list[str]
    script: list[str]


class RunCommand(TyperCommand):
    """Takes torchrun's options out of the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parts, in_place = Split([], [], args), ctx.obj == IN_PLACE or is_rank(os.environ)
        if args and args[0] != "--help" and not ctx.resilient_parsing and not in_place:
            parts = split(args)
        ctx.meta[_SPLIT] = parts
        rest = [*parts.agent, *parts.script]
        return list(super().parse_args(ctx, rest))


def with_agent_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the ``**given`` of ``function`` by command-line options made from Options."""
    signature = inspect.signature(function, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *map(_parameter, OPTIONS)])  # type: ignore[attr-defined]
    return function


def _parameter(option: Field[Any]) -> Parameter:
    means = option.metadata["meaning"]
    text = f"{means.help} ({means.allowed})." if means.allowed else f"{means.help}."
    text += f" Default: {means.unset}." if means.unset else ""
    default = typer.Option(option.default, help=text, show_default=not means.unset)
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=option.type)


Script = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The training script and its arguments.")
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")]
PolicyName = Annotated[str | None, typer.Option(help=" ".join(POLICY_HELP.split()))]


@with_agent_options
def run(
    context: typer.Context, *, script: Script, module: Module = False, policy: PolicyName = None, **given: Any
) -> None:
    parts: Split = context.meta[_SPLIT]
    if context.obj == IN_PLACE or is_rank(os.environ) or (is_task(os.environ) and not parts.launcher):
        become([*_own_flags(), *prepare(script, module, given, policy)])
    ours = prepare(script, module, given, policy, below=True)
    become(["-m", "torch.distributed.run", *_added(parts.launcher, os.environ), *parts.launcher, *ours])


def prepare(
    script: Sequence[str], module: bool, given: dict[str, Any], policy: str | None, *, below: bool = False
) -> list[str]:
    """Check the settings and leave them in the environment, and return the interpreter's arguments for the script.

    With ``below`` the processes that this one will start run the script, and not this one itself.
    """
    mode = given["mode"]
    options = make_options(given | {"job": given["job"] or (script[0] if module else Path(script[0]).stem)})
    if not module and not Path(script[0]).exists():
        raise InputError(f"script {script[0]}: no such file; allowed: a Python file, or a module with -m")
    if below and options.out is not None:
        place = next(one for one in (options.out, *options.out.parents) if one.exists())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise InputError(
                f"out = {str(options.out)!r}; allowed: a folder, and {place} is none that can be written to"
            )
    why, named = "", policy or options.candidates
    if options.mode in DECIDING and (below or not named):  # a rank may lack a file after a restart
        try:
            from paceenv.live.decide.live_policy import needed_policy

            why = needed_policy(options.mode, policy, options.candidates).fault
        except ImportError as error:
            why = str(needs("a policy", error.name or str(error), "live"))
    if why:
        raise InputError(f"mode {mode} cannot be entered: {why}")
    if options.mode != "off" and os.path.exists(options.kill_file or "") and os.environ.get("RANK", "0") == "0":
        say(f"warning: the kill file {options.kill_file} exists, so the agent will detach at once; to watch, remove it")
    if options.mode == mode:  # else it is the kill switch: as little as possible happens
        absolute = {"out": options.out, "kill_file": options.kill_file}  # the script may change the folder
        hand_down(given | absolute | {"job": options.job, "policy": absolute_policy(policy)}, below=below)
    elif os.environ.get("RANK", "0") == "0":
        say(f"{KILL_SWITCH}={os.environ[KILL_SWITCH]} switches the agent off, as any value but on and 1 does")
    return [*(["-m"] if module else []), *script]


def say(text: str) -> None:
    print(f"paceenv live run: {text}", file=sys.stderr)


def become(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the interpreter with these arguments."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def split(arguments: Sequence[str]) -> Split:
    """The parts of a command line; torchrun's own parser says which of its options take a value.

    Raises InputError for an option that nobody knows, and for one that would run no Python.
    """
    try:
        from torch.distributed.run import get_args_parser
    except ModuleNotFoundError as error:
        raise needs("paceenv live run", error.name, "live") from None
    ours = {f"--{option.name.replace('_', '-')}": True for option in OPTIONS}
    ours |= {"--policy": True, "-m": False, "--module": False, "--help": False}
    theirs = get_args_parser()._option_string_actions
    takes_value = {name: action.nargs != 0 for name, action in theirs.items()} | ours
    words, parts = list(arguments), Split([], [], [])
    while words and words[0].startswith("-") and (word := words.pop(0)) != "--":
        name, has_value = word.partition("=")[0], "=" in word
        if name.replace("_", "-") in ("--no-python", "--run-path"):
            raise InputError(f"{name}: the agent needs a Python script; allowed: without it")
        if name not in takes_value:
            raise InputError(f"no such option: {name}. See paceenv live run --help")
        part = parts.agent if name in ours else parts.launcher
        part.append(word)
        if words and not has_value and takes_value[name]:
            part.append(words.pop(0))
    parts.script.extend(words)
    ranks = get_args_parser().parse_args([*parts.launcher, "script"]).nproc_per_node
    if ranks not in ("auto", "cpu", "gpu", "xpu") and not (ranks.isdecimal() and int(ranks) > 0):
        raise out_of_range("--nproc-per-node", ranks, "a number of ranks, gpu, cpu or auto", "live run")
    return parts


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank.

    An operator on Kubernetes sets a node's ``RANK`` for the launcher inside its container, and torchrun's ``PET_``
    variables with it; a rank that torchrun started has ``LOCAL_RANK``.
    """
    named = environ.get("RANK") and environ.get("WORLD_SIZE")
    return bool(named) and ("LOCAL_RANK" in environ or not any(name.startswith("PET_") for name in environ))


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of ``srun``; without options of torchrun each is a rank."""
    return "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _added(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Options of torchrun that are added: a rank for each GPU, and no fixed port where there is one node."""

    def named(option: str) -> bool:
        words = {word.partition("=")[0].replace("_", "-") for word in given}
        return f"--{option}" in words or bool(environ.get(f"PET_{option.replace('-', '_').upper()}"))

    added = []
    if not named("nproc-per-node"):
        import torch

        gpus = torch.cuda.device_count()
        added.append(f"--nproc-per-node={gpus or 1}")
        say(f"{gpus} ranks, one for each GPU" if gpus else "1 rank, as PyTorch sees no GPU; more: --nproc-per-node N")
    if not any(map(named, _RENDEZVOUS)):
        added.append("--standalone")
        if not named("local-addr"):  # a container may not know its own name, and torchrun would wait for that
            added.append("--local-addr=127.0.0.1")
    return added


def _own_flags() -> list[str]:
    """The interpreter's options, as torchrun's ``-u``, where it was started as ``python ... -m paceenv.live``."""
    own, rest = sys.orig_argv, sys.argv[1:]
    before = own[1 : len(own) - len(rest)]
    return before[:-2] if own[len(own) - len(rest) :] == rest and before[-2:] == ["-m", "paceenv.live"] else []


def main() -> None:
    """Entry point of ``python -m paceenv.live``; exit code 2 for a user's mistake, before the script starts."""
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    name = "python -m paceenv.live"
    application.command(cls=RunCommand, help=HELP, context_settings=SETTINGS)(run)
    try:
        typer.main.get_command(application).main(sys.argv[1:], prog_name=name, standalone_mode=False, obj=IN_PLACE)
    except Exception as error:
        explain = getattr(error, "format_message", None)  # only errors of usage have one
        if explain is None and not isinstance(error, InputError):
            raise
        text = str(error) if explain is None else f"{explain()} See {name} --help"
        print(f"paceenv: error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
