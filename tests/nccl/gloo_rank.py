"""One rank of a job of PyTorch over Gloo, which needs no GPU: rank 1 stands still outside of its last collective.

Argument: a folder. Environment: as torchrun sets it, TORCH_WORKER_SERVER_SOCKET and TORCH_FR_BUFFER_SIZE. Prints
"ready". Writes the Flight Recorder's dump to the folder: PyTorch itself writes it for NCCL alone.
"""

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")
native: Any = import_module("torch._C._distributed_c10d")


def save_checkpoint() -> None:
    """What rank 1 does while rank 0 waits for it."""
    time.sleep(600)


def train(folder: Path) -> None:
    """Five steps, a collective of another group, and a sixth step that rank 1 never takes."""
    distributed.init_process_group("gloo")
    rank, group = distributed.get_rank(), distributed.new_group([0, 1])
    gradient = torch.ones(4)
    for _ in range(5):
        distributed.all_reduce(gradient)
    distributed.all_gather([torch.zeros(4) for _ in range(2)], gradient, group=group)
    dump = native._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    (folder / f"rank{rank}.pickle").write_bytes(dump)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if rank == 1:
        save_checkpoint()
    distributed.all_reduce(gradient)


if __name__ == "__main__":
    with import_module("torch.distributed.elastic.control_plane").worker_main():
        train(Path(sys.argv[1]))
