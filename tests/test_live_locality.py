"""A rank's place: from a made-up system tree, and from nonsense."""

from __future__ import annotations

from pathlib import Path

from paceenv.live.observe import locality


def test_what_is_not_there_raises_nothing_and_is_left_out(tmp_path: Path) -> None:
    assert not {"clock", "process", "backend"} & set(locality.describe(device="cuda:x", proc=tmp_path / "none"))
    (tmp_path / "sys" / "kernel" / "random").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "random" / "boot_id").write_text("b0-07\n")
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "time").symlink_to("time:[4026531834]")
    found = locality.describe(device="cuda:0", backend="nccl", proc=tmp_path)
    assert (found["clock"], found["backend"]) == ("b0-07 time:[4026531834]", "nccl")
