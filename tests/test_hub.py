"""The Hugging Face Hub, through its own library and a server of ours: push, load by name, and no network."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from paceenv.cli import application
from paceenv.core.errors import InputError
from paceenv.policies import saved
from paceenv.policies.hub import repository
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.evaluation.score_row import policy_path

COMMITS = ["1" * 40, "2" * 40]


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as two small files need; every commit keeps its files."""

    repositories: dict[str, list[dict[str, bytes]]]
    asked: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        name = "/".join(self.path.split("/")[3:5])
        if self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            self.repositories.setdefault(name, [])
            self.answer({"url": f"{self.server_name}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            parts = [json.loads(line) for line in body.splitlines()]
            files = {p["value"]["path"]: base64.b64decode(p["value"]["content"]) for p in parts if p["key"] == "file"}
            self.repositories[name].append(files)
            commit = COMMITS[len(self.repositories[name]) - 1]
            self.answer({"commitUrl": f"{self.server_name}/{name}/commit/{commit}", "commitOid": commit})
        else:
            self.send_error(404)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        parts = self.path.strip("/").split("/")
        if self.path.startswith("/api/models/"):
            name = "/".join(parts[2:4])
            commits = self.repositories.get(name)
            if not commits:
                self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            else:
                self.answer({"id": name, "sha": COMMITS[len(commits) - 1], "siblings": []})
            return
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        commits = self.repositories.get(name, [])
        known = {"main": len(commits) - 1} | {commit: n for n, commit in enumerate(COMMITS[: len(commits)])}
        if not commits:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in known:
            self.answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif file not in commits[known[revision]]:
            commit = {"X-Repo-Commit": COMMITS[known[revision]]}
            self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", **commit})
        else:
            blob = commits[known[revision]][file]
            headers = {"ETag": f'"{hashlib.sha256(blob).hexdigest()}"', "X-Repo-Commit": COMMITS[known[revision]]}
            self.send(200, blob, headers)

    do_HEAD = do_GET

    @property
    def server_name(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]

    def answer(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, blob: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(blob))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(blob)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    import huggingface_hub.constants
    import huggingface_hub.file_download

    ours = type("OurHub", (Hub,), {"repositories": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), ours)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "a-token")
    yield ours
    server.shutdown()
    server.server_close()
    thread.join()


def push(*arguments: str) -> int:
    entry = EntryPoint("policy", "paceenv.policies.hub.policy_command:application", application.GROUP)
    return application._run_command(entry, ["push", *arguments])


def test_what_was_pushed_is_loaded_by_name(hub: type[Hub], capsys: pytest.CaptureFixture[str]) -> None:
    assert push("learned", "--repo", "me/pacing", "--json", "-") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["sent"]
    assert done["commit"].endswith(COMMITS[0])
    assert set(hub.repositories["me/pacing"][0]) == {"policy.safetensors", "README.md"}
    path, content = saved.find("hf:me/pacing")
    assert path.read_bytes() == saved.released().read_bytes()
    assert content.policy.layers[0][0].shape == load_policy(saved.released()).policy.layers[0][0].shape
    assert saved.find("hf:me/pacing:preference=0.3")[1].policy.preference == 0.3
    assert policy_path("hf:me/pacing") == path
    hub.repositories["me/pacing"].append({"policy.safetensors": b"not a policy"})
    with pytest.raises(InputError, match="not a readable"):
        saved.find("hf:me/pacing")
    pinned, _ = saved.find(f"hf:me/pacing@{COMMITS[0]}")
    assert pinned.read_bytes() == saved.released().read_bytes()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:me/none", "cannot be loaded: RepositoryNotFoundError"),
        ("hf:me/pacing@nothing", "cannot be loaded: RevisionNotFoundError"),
        ("hf:me/empty", "EntryNotFoundError"),
        ("hf:pacing", "allowed: hf:owner/name, or hf:owner/name@revision"),
        ("hf:../../etc/passwd", "allowed: hf:owner/name"),
        ("hf:me/pacing@", "allowed: hf:owner/name"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(name: str, expected: str, hub: type[Hub]) -> None:
    hub.repositories |= {"me/pacing": [{"policy.safetensors": b""}], "me/empty": [{"README.md": b""}]}
    with pytest.raises(InputError) as caught:
        saved.find(name)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_network_loading_and_pushing_say_so(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push("learned", "--repo", "me/kept") == 0
    kept, _ = saved.find("hf:me/kept")
    hub.asked.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert saved.find("hf:me/kept")[0] == kept, "as it was kept from before"
    with pytest.raises(
        InputError, match=r"policy hf:me/pacing: cannot be loaded: no network, and not kept.*; allowed: a rep"
    ):
        saved.find("hf:me/pacing")
    with pytest.raises(InputError, match=r"me/pacing: cannot be written: .*; or --dry-run"):
        push("learned", "--repo", "me/pacing")
    capsys.readouterr()
    assert push("learned", "--repo", "me/pacing", "--dry-run", "-o", str(tmp_path / "card"), "--json", "-") == 0
    done = json.loads(capsys.readouterr().out)
    assert not done["sent"]
    assert done["sha256"] == hashlib.sha256((tmp_path / "card" / "policy.safetensors").read_bytes()).hexdigest()
    assert hub.asked == []


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"needs huggingface_hub; install paceenv\[hub\]"):
        repository.fetch("hf:me/pacing")


def test_the_card_is_one_that_the_hub_reads(tmp_path: Path) -> None:
    digest = hashlib.sha256(saved.released().read_bytes()).hexdigest()
    one = {"sha256": digest, "gap_closed": 0.8, "gain": 0.05, "worst_null": ["one-job", -0.001]}
    (tmp_path / "row.json").write_text(json.dumps({"split": "held-out", "policies": [one]}))
    arguments = ["learned", "--repo", "me/pacing", "--dry-run", "-o", str(tmp_path)]
    assert push(*arguments, "--score", str(tmp_path / "row.json")) == 0
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.license) == ("paceenv", "apache-2.0")
    assert card.data.eval_results is not None
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found == {"gap_closed": 0.8, "throughput_gain": 0.05, "worst_null": -0.001}
    assert digest in card.text
    assert "hf:me/pacing" in card.text
    assert "| 0 | `step_inflation` |" in card.text
    header = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert header["pipeline_tag"] == "reinforcement-learning"
    preferred = {**one, "policy": "learned:preference=0.5"}
    (tmp_path / "row.json").write_text(json.dumps({"split": "held-out", "policies": [preferred]}))
    with pytest.raises(InputError, match="with another preference than its own; allowed: paceenv score"):
        push(*arguments, "--score", str(tmp_path / "row.json"))
    (tmp_path / "row.json").write_text(json.dumps({"split": "held-out", "policies": [{**one, "sha256": "0"}]}))
    with pytest.raises(InputError, match="of another policy; allowed: paceenv score"):
        push(*arguments, "--score", str(tmp_path / "row.json"))
    (tmp_path / "row.json").write_text("{}")
    with pytest.raises(InputError, match="not a score"):
        push(*arguments, "--score", str(tmp_path / "row.json"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["adaptive", "--repo", "me/a"], "policy adaptive: no such file"),
        (["learned", "--repo", "a b"], "allowed: hf:owner/name"),
        (["learned:preference=0.5", "--repo", "me/a"], "allowed: a policy without a preference"),
        (["learned", "--repo", "me/a@main"], "--repo me/a@main: allowed: owner/name, without a revision"),
        (["learned", "--repo", "me/a", "-o", "x"], "--out x: allowed: with --dry-run"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        push(*arguments)
    assert expected in str(caught.value)
