"""Several processes that train together, as torchrun would start them, but without the seconds that imports take."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from lightning.pytorch.utilities import rank_zero_only


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a process on a single machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": "test",
    }


def together(work: Callable[[int], Any], processes: int = 2, seconds: float = 100) -> list[Any]:
    """Call `work(rank)` in forked processes and return the results of all, or the status with which it exits.

    Raises:
        RuntimeError: a process has ended without a result, or has not ended in time.
    """
    port, context = free_port(), multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(processes)]
    children = [
        context.Process(target=_child, args=(work, rank, processes, port, pipes[rank][1])) for rank in range(processes)
    ]
    for child, (_, sender) in zip(children, pipes, strict=True):
        child.start()
        sender.close()
    results = []
    try:
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(seconds):
                raise RuntimeError(f"process {rank} hangs")
            try:
                results.append(receiver.recv())
            except EOFError:
                children[rank].join()
                raise RuntimeError(f"process {rank} ended with status {children[rank].exitcode}") from None
        for child in children:
            child.join(seconds)
    finally:
        for child in children:
            child.kill()
    return results


def _child(work: Callable[[int], Any], rank: int, processes: int, port: int, result: Connection) -> None:
    os.environ.update(variables(rank, processes, port))
    rank_zero_only.rank = rank  # as it would be if Lightning had been imported in this environment
    torch.set_num_threads(1)  # the OpenMP runtime of a forked process must not start threads
    try:
        try:
            result.send(work(rank))
        except SystemExit as end:
            result.send(end.code or 0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Record(Callback):
    """Write down which images each process trains on, by their sums, in a file of the process.

    Args:
        folder: folder for the files.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.folder.mkdir(exist_ok=True)
        own, _ = trainer.train_dataloader.sampler.share(batch_idx) if trainer.world_size > 1 else (len(batch[1]), 0)
        with (self.folder / str(os.getpid())).open("a") as file:
            file.writelines(f"{image.sum(dtype=torch.float64).item()}\n" for image in batch[0][:own])
