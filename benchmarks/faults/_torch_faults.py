"""Odd uses of PyTorch, and PyTorch that others have changed."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import copy
import functools
import gc
import threading
import time
from datetime import timedelta
from typing import Any

from benchmarks.faults._fault import Job, fault


@fault("process group is destroyed and made again", "once often by_iteration", ranks=2)
def again(job: Job) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    model = job.network()

    def renew(i: int) -> None:
        if i % {"once": 20, "often": 8, "by_iteration": 1}[job.variant]:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        store = FileStore(str(job.folder / f"store{i}"), job.size)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size)

    optimizer = job.optimizer(model)

    def step(i: int) -> None:
        wrapped = job.ddp(model)
        optimizer.zero_grad()
        wrapped(job.inputs(i)).square().mean().backward()
        optimizer.step()

    job.train(model, optimizer, before=renew, step=step)


@fault("groups come and go", "new destroyed collected subgroups nameless", ranks=2)
def groups(job: Job) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, PrefixStore

    job.begin()
    kept: list[Any] = []

    def use(i: int) -> None:
        one = torch.ones(3)
        if job.variant == "subgroups":
            group, _ = dist.new_subgroups(1)
        elif job.variant == "nameless":
            store = PrefixStore(f"x{i}", FileStore(str(job.folder / "nameless"), job.size))
            backend: Any = dist.ProcessGroupGloo(store, job.rank, job.size, timedelta(seconds=30))
            backend.allreduce([one]).wait()
            return
        else:
            group = dist.new_group([0, 1])
        dist.all_reduce(one, group=group)
        if job.variant == "destroyed":
            dist.destroy_process_group(group)
        elif job.variant == "collected":
            work = dist.all_reduce(one, group=group, async_op=True)
            del group
            gc.collect()
            work.wait()
        else:
            kept.append(group)

    job.train(before=use)


@fault("others replace the same functions", "before after nested out_of_order raising slots", ranks=2)
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
    originals = {(owner, name): getattr(owner, name) for owner, name in places}
    calls = [0]

    def wrap() -> None:
        for owner, name in places:
            original = getattr(owner, name)

            def ours(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                calls[0] += 1
                return original(*args, **kwargs)

            setattr(owner, name, functools.wraps(original)(ours))

    def restore() -> None:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)

    job.begin()
    if job.variant in ("before", "out_of_order"):
        wrap()

    def change(i: int) -> None:
        if i == 10 and job.variant in ("after", "nested"):
            wrap()
        if i == 20 and job.variant == "nested":
            wrap()
        if i in (20, 30) and job.variant in ("out_of_order", "nested"):
            (restore if i == 20 and job.variant == "out_of_order" else wrap)()
        if i == 10 and job.variant == "raising":
            Work.wait = functools.partial(_raises_sometimes, Work.wait, [0])  # type: ignore[method-assign]
        one = torch.ones(3)
        dist.all_reduce(one)

    job.train(before=change)


def _raises_sometimes(original: Any, calls: list[int], *args: Any) -> Any:
    return original(*args)


@fault("torch.compile", "model step functional fullgraph optimizer ddp", ranks=2, code_only=False)
def compiled(job: Job) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    job.begin()
    network = job.network()
    model = job.ddp(torch.compile(network, backend="eager") if job.variant == "model" else network)
    optimizer = job.optimizer(model)
    world: Any = dist.group.WORLD
    compile_: Any = functools.partial(torch.compile, backend="eager")

    def body(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def reduced(x: Any) -> Any:
        return functional.all_reduce(x, "sum", world) * 2

    run: Any = {"step": compile_(body), "ddp": compile_(model)}.get(job.variant)
    reduce = compile_(reduced, fullgraph=job.variant == "fullgraph")
    stepped = compile_(optimizer.step) if job.variant == "optimizer" else optimizer.step

    def step(i: int) -> None:
        optimizer.zero_grad()
        x = job.inputs(i)
        if job.variant == "step":
            run(x)
        else:
            (run if job.variant == "ddp" else model)(x).square().mean().backward()
        if job.variant in ("functional", "fullgraph"):
            with torch.no_grad():
                network[0].bias.grad += reduce(torch.ones(3)).sum() * 0.001
        stepped()

    job.train(model, optimizer, iterations=12, step=step)


@fault(
    "odd DDP", "deepcopy hook_fp16 hook_raises hook_none static unused no_sync join two_models buckets ignored", ranks=2
)
def odd_ddp(job: Job) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    job.begin()
    network = job.network()
    options: Any = {
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "buckets": {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    }.get(job.variant, {})
    if job.variant == "ignored":
        from torch.nn.parallel import DistributedDataParallel

        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["0.weight", "0.bias"])
    model = job.ddp(network, **options)
    other = job.ddp(job.network()) if job.variant == "two_models" else model
    calls = [0]

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls[0] += 1
        if job.variant == "hook_raises" and calls[0] == 20:
            raise ValueError("of the hook")
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0] / 2)
        return future

    hook.__annotations__ = {
        "bucket": vars(dist)["GradBucket"],
        "return": torch.futures.Future[torch.Tensor],
    }  # DDP reads them
    if job.variant.startswith("hook"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook if job.variant == "hook_fp16" else hook)
    optimizer = job.optimizer(model)

    def step(i: int) -> None:
        nonlocal model
        if job.variant == "deepcopy" and i % 10 == 9:
            model = copy.deepcopy(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if i % 4 == 0:
            optimizer.zero_grad()
        if job.variant == "no_sync" and i % 4 != 3:
            with model.no_sync():
                model(job.inputs(i)).square().mean().backward()
            return
        (model(job.inputs(i)).square().mean() + other(job.inputs(i)).abs().mean()).backward()
        optimizer.step()

    if job.variant == "join":
        with model.join():
            job.train(model, optimizer, iterations=20 + 10 * job.rank)
    else:
        job.train(model, optimizer, step=step)
        job.told(model.parameters())


@fault("odd backward passes", "grad retained double reentrant nested anomaly raises threads checkpoint hooks", ranks=2)
def odd_backward(job: Job) -> None:  # noqa: C901  # one branch per way
    import torch
    from torch.utils.checkpoint import checkpoint

    job.begin()
    network = job.network()
    model = job.ddp(network)
    optimizer = job.optimizer(model)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise ArithmeticError("of the job")

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with torch.enable_grad():
                y = torch.ones(3, requires_grad=True)
                y.sum().backward()
            return gradient

    def step(i: int) -> None:
        optimizer.zero_grad()
        x = job.inputs(i)
        if job.variant == "grad":
            gradients = torch.autograd.grad(network(x).square().mean(), list(network.parameters()))
            for p, g in zip(network.parameters(), gradients, strict=True):
                p.grad = g
        elif job.variant == "retained":
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        elif job.variant == "double":
            x.requires_grad_()
            (inner,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
            (model(x).square().mean() + inner.square().mean()).backward()
        elif job.variant in ("reentrant", "checkpoint"):
            x.requires_grad_()
            hidden: Any = checkpoint(network[0], x, use_reentrant=job.variant == "reentrant")
            network[2](network[1](hidden)).square().mean().backward()
        elif job.variant in ("nested", "raises"):
            one = Nested if job.variant == "nested" or i != 20 else Fails
            one.apply(model(x)).square().mean().backward()
        elif job.variant == "threads":
            losses = [network(x).square().mean() for _ in range(3)]
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
                thread.join()
        else:
            model(x).square().mean().backward()
        optimizer.step()

    if job.variant == "hooks":
        for p in network.parameters():
            p.register_hook(lambda g: g * 2)
            p.register_post_accumulate_grad_hook(lambda p: None)
    if job.variant == "anomaly":
        with torch.autograd.detect_anomaly(check_nan=True):
            job.train(model, optimizer, step=step)
    else:
        job.train(model, optimizer, step=step)


@fault("profilers", "profile schedule record_function emit", ranks=2)
def profilers(job: Job) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    job.begin()
    if job.variant == "schedule":
        with profile(
            activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=2, active=3), with_stack=True
        ) as p:
            job.train(before=lambda i: p.step())
    elif job.variant == "record_function":
        with torch.profiler.record_function("all"):
            job.train()
    elif job.variant == "emit":
        with torch.autograd.profiler.profile(use_kineto=False):
            job.train()
    else:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True):
            job.train()


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
