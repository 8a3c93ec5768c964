"""torchrun for ``paceenv live run``: its report on failed ranks is headed by the script, the first argument here."""

import sys

from torch.distributed import run
from torch.distributed.launcher import api

if __name__ == "__main__":
    name = sys.argv.pop(1)
    api._get_entrypoint_name = lambda entrypoint, args: name  # else it is headed by the module that ranks begin with
    run.main()
