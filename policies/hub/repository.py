"""A policy's repository on the Hugging Face Hub: loaded by ``hf:owner/name``, written by ``paceenv policy push``.

It holds ``policy.safetensors``, which is data, and ``README.md``; nothing else of a repository is ever read. Needs
huggingface_hub (extra ``hub``), which keeps what it loaded, and whose own login gives the right to write. The server is
that of the variable ``HF_ENDPOINT``, if it is set.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from paceenv.core.errors import InputError

PREFIX = "hf:"
FILE, CARD = "policy.safetensors", "README.md"
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_REVISION = re.compile(r"[\w./-]{1,120}")


def parts(text: str) -> tuple[str, str | None]:
    """Repository and revision of ``owner/name`` or ``owner/name@revision``, without the prefix; else InputError."""
    name, separator, revision = text.removeprefix(PREFIX).partition("@")
    if not _REPOSITORY.fullmatch(name) or (separator and not _REVISION.fullmatch(revision)):
        raise InputError(f"policy {text}: allowed: {PREFIX}owner/name, or {PREFIX}owner/name@revision to pin one")
    return name, revision or None


def fetch(text: str) -> Path:
    """The policy file of ``hf:owner/name`` or ``hf:owner/name@revision``, loaded or as it was kept from before.

    Raises InputError without huggingface_hub, without a network, and for a repository that has no policy file.
    """
    name, revision = parts(text)
    hub, local = _library(text), not _reachable()
    try:
        path = hub.hf_hub_download(name, FILE, revision=revision, endpoint=_endpoint(), local_files_only=local)
    except Exception as error:  # of the library, or of what it calls: no network, no such repository, not allowed
        allowed = f"a repository with {FILE} and a network, or the path of a policy file"
        reason = "no network, and not kept from before" if local else _reason(error)
        raise InputError(f"policy {text}: cannot be loaded: {reason}; allowed: {allowed}") from None
    return Path(path)


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Write the files of a folder into a repository, which is made if it does not exist; the commit's address.

    Args:
        folder: with :data:`FILE` and :data:`CARD`.
        repository: ``owner/name``.
        private: where it is made.
        message: of the commit.

    Raises:
        InputError: where the Hub cannot be reached, or refuses.
    """
    name, _ = parts(repository)
    api = _library(repository).HfApi(endpoint=_endpoint(), library_name="paceenv")
    try:
        api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=[FILE, CARD], commit_message=message)
    except Exception as error:
        allowed = "a network, and the right to write there (hf auth login); or --dry-run"
        raise InputError(f"{repository}: cannot be written: {_reason(error)}; allowed: {allowed}") from None
    return str(done.commit_url)


def _library(where: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f"{where}: needs huggingface_hub; install paceenv[hub]") from None
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _reachable() -> bool:
    """Whether the server can be asked at all: the library would try for 25 s. Behind a proxy nobody knows."""
    if urllib.request.getproxies():
        return True
    url = urllib.parse.urlsplit(_endpoint() or "https://huggingface.co")
    try:
        socket.create_connection((url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), 5.0).close()
    except OSError:
        return False
    return True


def _reason(error: Exception) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
