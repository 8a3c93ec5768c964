"""At the start of a Python process below ``-m paceenv.live``: wait for its first optimizer, and do nothing else.

The script comes by here, and so do the ranks that it starts by itself (``mp.spawn``, the launchers of Lightning and
accelerate) and every other Python process below it, of any version. So this imports nothing of ours, leaves
``sys.path`` as it was, and runs the ``sitecustomize`` that would have run.
"""

import importlib
import os
import sys


class _Finder:
    """Sees the import of PyTorch's optimizers once; only then our package is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        before = list(sys.path)
        try:
            import json

            sys.path.append(json.loads(os.environ["PACEENV_LIVE_SETTINGS"])["root"])  # of a checkout
            from paceenv.live.start.attach_hook import spec_of_optimizers

            return spec_of_optimizers(name, path, target)
        except Exception:  # another environment without our package: this process has no agent
            return None
        finally:
            sys.path[:] = before


def _as_it_would_have_been():  # type: ignore[no-untyped-def]
    here, ours = os.path.dirname(os.path.abspath(__file__)), sys.modules.get("sitecustomize")
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "") != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours  # there is no other one


if __name__ == "sitecustomize":
    if "PACEENV_LIVE_SETTINGS" in os.environ:
        sys.meta_path.insert(0, _Finder())
    _as_it_would_have_been()  # type: ignore[no-untyped-call]
