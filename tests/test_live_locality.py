"""A rank's place: from a made-up system tree, from nonsense, and on the machine the tests run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceenv.live.observe import locality


def test_a_rank_is_described(tmp_path: Path) -> None:
    (tmp_path / "sys" / "kernel" / "random").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "random" / "boot_id").write_text("b0-07\n")
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "time").symlink_to("time:[4026531834]")
    found = locality.describe(device="cuda:0", backend="nccl", proc=tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert (found["clock"], found["backend"]) == ("b0-07 time:[4026531834]", "nccl")


def test_nonsense_raises_nothing_and_nothing_is_said_of_what_is_not_there(tmp_path: Path) -> None:
    found = locality.describe(device="cuda:x", proc=tmp_path)
    assert not {"clock", "gpu", "backend"} & set(found)


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_described() -> None:
    import torch

    torch.zeros(1, device="cuda")
    gpu = locality.describe(device="cuda:0")["gpu"]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert gpu["pci"]
