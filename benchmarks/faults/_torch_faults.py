"""Odd uses of PyTorch, and PyTorch that others have changed."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import functools
import threading
import time
from typing import Any

from benchmarks.faults._fault import Job, fault


@fault("process group is destroyed and made again", "8 1", ranks=2)
def again(job: Job) -> None:
    """Every so many iterations."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    model = job.network()
    optimizer = job.optimizer(model)

    def renew(i: int) -> None:
        if i % int(job.variant) == 0:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = FileStore(str(job.folder / f"store{i}"), job.size)
            dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)

    def step(i: int) -> None:
        wrapped = job.ddp(model)
        optimizer.zero_grad()
        wrapped(job.inputs(i)).square().mean().backward()
        optimizer.step()

    job.train(model, optimizer, before=renew, step=step)


@fault("others replace the same functions", "before after nested out_of_order", ranks=2)
def replaced(job: Job) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import ProcessGroup, Work
    from torch.nn.parallel import DistributedDataParallel

    places: list[tuple[Any, str]] = [
        (ProcessGroup, "allreduce"),
        (ProcessGroup, "broadcast"),
        (Work, "wait"),
        (DistributedDataParallel, "forward"),
        (torch.optim.Optimizer, "zero_grad"),
        (torch.optim.SGD, "step"),
        (dist, "all_reduce"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]

    def wrap() -> None:
        for owner, name in places:
            original = getattr(owner, name)

            def theirs(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                return original(*args, **kwargs)

            setattr(owner, name, functools.wraps(original)(theirs))

    def restore() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    changes = {"after": {10: wrap}, "nested": {10: wrap, 20: wrap, 30: wrap}, "out_of_order": {20: restore, 30: wrap}}
    if job.variant in ("before", "out_of_order"):
        wrap()

    def change(i: int) -> None:
        changes.get(job.variant, {}).get(i, lambda: None)()
        dist.all_reduce(torch.ones(3))

    job.train(before=change)


@fault("odd DDP", "hook_raises hook static unused no_sync join", ranks=2)
def odd_ddp(job: Job) -> None:
    import torch
    import torch.distributed as dist

    job.begin()
    options: Any = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}
    model = job.ddp(**options.get(job.variant, {}))
    optimizer = job.optimizer(model)
    calls = [0]

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls[0] += 1
        if job.variant == "hook_raises" and calls[0] == 20:
            raise ValueError("of the hook")
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0] / 2)
        return future

    if job.variant.startswith("hook"):
        hook.__annotations__ = {
            "bucket": vars(dist)["GradBucket"],
            "return": torch.futures.Future[torch.Tensor],
        }  # DDP reads them
        model.register_comm_hook(None, hook)

    def step(i: int) -> None:
        if i % 4 == 0:
            optimizer.zero_grad()
        if job.variant == "no_sync" and i % 4 != 3:
            with model.no_sync():
                model(job.inputs(i)).square().mean().backward()
            return
        model(job.inputs(i)).square().mean().backward()
        optimizer.step()

    if job.variant == "join":
        with model.join():
            job.train(model, optimizer, iterations=20 + 10 * job.rank)
    else:
        job.train(model, optimizer, step=step)
        job.told(model.parameters())


@fault("odd backward passes", "retained double reentrant nested raises threads", ranks=2)
def odd_backward(job: Job) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    job.begin()
    network = job.network()
    model = job.ddp(network)
    optimizer = job.optimizer(model)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if job.variant == "raises":
                raise ArithmeticError("of the job")
            with torch.enable_grad():
                torch.ones(3, requires_grad=True).sum().backward()
            return gradient

    def step(i: int) -> None:
        optimizer.zero_grad()
        x = job.inputs(i)
        if job.variant == "retained":
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        elif job.variant == "double":
            x.requires_grad_()
            (inner,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
            (model(x).square().mean() + inner.square().mean()).backward()
        elif job.variant == "reentrant":
            hidden: Any = checkpoint(network[0], x.requires_grad_(), use_reentrant=True)
            network[2](network[1](hidden)).square().mean().backward()
        elif job.variant == "threads":
            for loss in [network(x).square().mean() for _ in range(3)]:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
        else:
            inner = Inner.apply(model(x)) if job.variant == "nested" or i == 20 else model(x)
            inner.square().mean().backward()
        optimizer.step()

    job.train(model, optimizer, step=step)


@fault("collectives that fail", "shapes timeout dtype destroyed wrong_rank", ranks=2, code_only=True)
def failing(job: Job) -> None:
    import torch
    import torch.distributed as dist

    job.begin(3.0 if job.variant == "timeout" else 20.0)
    caught = list[str]()

    def fail(i: int) -> None:
        if i not in (15, 25):
            return
        try:
            if job.variant == "shapes":
                dist.all_gather([torch.zeros(3)], torch.zeros(4))
            elif job.variant == "dtype":
                dist.all_reduce(torch.zeros(3, dtype=torch.complex64), op=dist.ReduceOp.MAX)
            elif job.variant == "wrong_rank":
                dist.broadcast(torch.zeros(3), src=7)
            elif job.variant == "destroyed":
                group: Any = dist.new_group([0, 1])
                dist.destroy_process_group(group)
                dist.all_reduce(torch.zeros(3), group=group)
            elif job.rank:
                time.sleep(5.0)
        except (RuntimeError, ValueError, TypeError) as error:
            caught.append(type(error).__name__)

    job.train(before=fail)
    print(caught)
