"""``paceenv policy push``: a policy on the Hugging Face Hub, with its card."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.policies import saved
from paceenv.policies.hub.model_card import model_card
from paceenv.policies.hub.repository import CARD, FILE, parts
from paceenv.policies.hub.repository import push as push_folder
from paceenv.ui import output

application = typer.Typer(
    help="Share a policy on the Hugging Face Hub.", no_args_is_help=True, pretty_exceptions_enable=False
)


@application.callback()
def policy() -> None:
    """Share a policy on the Hugging Face Hub. Every command loads it by name: hf:owner/name, or hf:owner/name@revision.

    Examples: paceenv policy push learned --repo me/pacing --dry-run -- paceenv evaluate hf:me/pacing
    """


@application.command()
def push(
    policy: Annotated[str, typer.Argument(help="learned, or a policy file.")],
    repo: Annotated[str, typer.Option(help="owner/name; it is made if it does not exist.")],
    score: Annotated[Path | None, typer.Option(help="A file of paceenv score about this policy.")] = None,
    licence: Annotated[str, typer.Option("--license", help="By the Hub's names.")] = "apache-2.0",
    private: Annotated[bool, typer.Option(help="Where the repository is made.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Policy of paceenv",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the files here and send nothing.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the files of a dry run.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help=output.JSON_HELP)] = None,
) -> None:
    """Put a policy file and its card into a repository of the Hugging Face Hub.

    Sends two files: policy.safetensors and README.md. Sign in with the Hub's own command first: hf auth login.

    Examples: paceenv policy push learned --repo me/pacing --dry-run -o runs/card
    -- paceenv policy push runs/mine/policy.safetensors --repo me/pacing --score mine.json
    """
    name, revision = parts(repo)
    if revision is not None:
        raise InputError(f"--repo {repo}: allowed: owner/name, without a revision")
    if out is not None and not dry_run:
        raise InputError(f"--out {out}: allowed: with --dry-run")
    if saved.parts(policy)[1] is not None:
        raise InputError(f"policy {policy}: allowed: a policy without a preference, as its file has its own")
    path, content = saved.find(policy)
    card = model_card(path, content, name, _row(score, path), licence)
    with tempfile.TemporaryDirectory() as temporary:
        folder = out if out is not None else Path(temporary)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {out}: is a file; allowed: a folder")
        folder.mkdir(parents=True, exist_ok=True)
        if path.resolve() != (folder / FILE).resolve():
            shutil.copyfile(path, folder / FILE)
        atomic_write(folder / CARD, card.encode())
        found: dict[str, Any] = {
            "repository": name,
            "files": {one: (folder / one).stat().st_size for one in (FILE, CARD)},
            "sha256": hashlib.sha256((folder / FILE).read_bytes()).hexdigest(),
            "sent": not dry_run,
        }
        if dry_run:
            found["folder"] = str(out) if out is not None else None
        else:
            found["commit"] = push_folder(folder, name, private=private, message=message)
    if json_ is not None:
        output.write_json(found, json_)
    if json_ != "-":
        rows = [(file, f"{size:,} bytes") for file, size in found["files"].items()]
        where = found.get("commit") or (f"nothing was sent; the files are in {out}" if out else "nothing was sent")
        output.print_table(f"{name}: {policy}", ("file", "size"), rows, where)


def _row(path: Path | None, policy: Path) -> dict[str, Any] | None:
    """A score of this very policy; InputError for another one's."""
    if path is None:
        return None
    try:
        row = json.loads(path.read_text())
        scored, row["split"] = [one["sha256"] for one in row["policies"]], str(row["split"])
        one = row["policies"][0]
        _ = [one["gap_closed"], one["gain"], one["worst_null"]]
        preferred = ":preference=" in str(one.get("policy"))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"--score {path}: not a score: {error}; allowed: a file of paceenv score -o") from None
    if scored != [hashlib.sha256(policy.read_bytes()).hexdigest()] or preferred:
        other = "with another preference than its own" if preferred else "of another policy"
        raise InputError(f"--score {path}: {other}; allowed: paceenv score --policy {policy} -o {path}")
    return dict(row)
