"""The live agent in a plain DistributedDataParallel script: two lines, and it says which rank is late.

You learn: ``live.attach`` before the loop and ``agent.detach`` after it are all that a script needs; the agent observes
and changes nothing. Rank 1 sleeps 20 ms in each step here, as a slow data loader would make it. At the end rank 0
prints the agent's page: rank 1 is late, by how much, and who waits for it. The loss is the same without the agent.

    torchrun --nproc-per-node 2 examples/live_ddp.py --out runs/live/ddp
    paceenv live status runs/live/ddp     # in another terminal, while it runs
    paceenv diagnose runs/live/ddp        # afterwards
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceenv import live


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="steps to train (%(default)s)")
    parser.add_argument("--late-ms", type=float, default=20.0, help="what rank 1 sleeps in each step (%(default)s)")
    parser.add_argument("--mode", default="observe", help="observe, shadow, canary, ... (%(default)s)")
    parser.add_argument("--policy", default=None, help="for every mode but observe: learned, adaptive, a policy file")
    parser.add_argument("--out", default="runs/live/ddp", help="folder of the agent (%(default)s)")
    options = parser.parse_args(argv)

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = DistributedDataParallel(torch.nn.Linear(256, 256).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    agent = live.attach(optimizer, policy=options.policy, mode=options.mode, out=options.out)
    for _ in range(options.steps):
        if dist.get_rank() == 1:
            time.sleep(options.late_ms / 1e3)
        loss = model(torch.randn(32, 256, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    agent.detach()  # rank 0 prints the page

    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} after {options.steps} steps; trace and page are in {options.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
