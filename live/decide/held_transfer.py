"""A collective that was asked for and starts later, and the ``Work`` that its caller gets at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any


class Transfer:
    """A collective that was asked for and may not have started."""

    def __init__(
        self,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        asked_s: float,
        due_s: float,
        sequence: int,
        counts: int = 1,
    ) -> None:
        import torch

        self.counts = counts
        self.args, self.asked_s, self.due_s, self.sequence = tuple(map(_kept, args)), asked_s, due_s, sequence
        self._original, self._kwargs = original, {name: _kept(value) for name, value in kwargs.items()}
        self._gradients = torch.is_grad_enabled()
        self._work: Any = None
        self.begun = False
        self.error: BaseException | None = None

    @property
    def known(self) -> bool:
        """Whether its start is over."""
        return self._work is not None or self.error is not None

    def start(self) -> None:
        """Start it, unless that has been done. An error is for those who ask for the result."""
        if self.begun:
            return
        import torch

        self.begun = True
        try:
            with torch.set_grad_enabled(self._gradients):
                self._work = self._original(*self.args, **self._kwargs)
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.args, self._kwargs = (), {}

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        if self._work is None:
            raise RuntimeError("the start of this collective was interrupted")
        return self._work


def held_work(begin: Callable[[], Any]) -> Any:
    """A ``torch.distributed.Work`` that calls ``begin`` for the real one as soon as anybody asks it for something."""
    return _work_class()(begin)


@functools.cache
def _work_class() -> type:
    from torch.distributed import Work

    def asks(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._begin(), name)(*args, **kwargs)

        return method

    def begin_with(self: Any, begin: Callable[[], Any]) -> None:
        Work.__init__(self)
        self._begin = begin

    names = [
        name for name in vars(Work) if not name.startswith("__") and name not in ("unbox", "_pybind11_conduit_v1_")
    ]
    return type("HeldWork", (Work,), {"__init__": begin_with} | {name: asks(name) for name in names})


def _kept(argument: Any) -> Any:
    """The argument as it is now: PyTorch copies lists when it is called, and leaves tensors and options."""
    return [_kept(part) for part in argument] if isinstance(argument, (list, tuple)) else argument


def _tensors(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (list, tuple)):
        for part in argument:
            yield from _tensors(part)
    elif hasattr(argument, "untyped_storage"):
        yield argument


def on_cpu(argument: Any) -> bool:
    """Whether all tensors in an argument are plain ones on the CPU."""
    import torch

    return all(
        type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu" and one.layout is torch.strided
        for one in _tensors(argument)
    )


def plain_mode() -> bool:
    """Whether a call on another thread would do the same: no mode of this thread watches or changes it."""
    import torch

    stacks = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    return not any(stacks) and not torch.is_inference_mode_enabled()
