"""The processes of a run as threads of this one, on as many machines as a test likes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_EXCHANGES = (
    "agreement.gather_object",
    "agreement.broadcast_object_list",
    "agreement.broadcast",
)
_LIMIT_S = 120.0
"""Only to end a test in which a process waits for one that has ended."""


class PretendedProcesses:
    """Threads that exchange what processes do; one at a time computes, as libraries load models into globals.

    Args:
        num_machines: each has ``num_local`` processes.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, num_machines: int, num_local: int) -> None:
        self._num_local, self._num = num_local, num_machines * num_local
        self._barrier = threading.Barrier(self._num, timeout=_LIMIT_S)
        self._computing = threading.Lock()
        self._exchanged: list[Any] = [None] * self._num
        self._own = threading.local()
        for name in _EXCHANGES:
            exchange = getattr(self, f"_{name.partition('.')[2]}")
            patch.setattr(f"diffsynth_lite.training.distributed.{name}", exchange)
        patch.setattr("diffsynth_lite.training.distributed.agreement.gethostname", self._gethostname)

    def run(self, work: Callable[[Any, int], Any]) -> list[Any]:
        """By rank, what ``work`` gives or raises for an accelerator and the place of its machine."""
        with ThreadPoolExecutor(self._num) as threads:
            started = [threads.submit(self._run, rank, work) for rank in range(self._num)]
        return [process.exception() or process.result() for process in started]

    def _run(self, rank: int, work: Callable[[Any, int], Any]) -> Any:
        self._own.rank = rank
        machine, place = divmod(rank, self._num_local)
        accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=self._num,
            process_index=rank,
            is_main_process=rank == 0,
            is_local_main_process=place == 0,
            reduce=lambda tensor, reduction: sum(self._exchange(tensor)),
        )
        with self._computing:
            return work(accelerator, machine)

    def _exchange(self, value: Any) -> list[Any]:
        self._exchanged[self._own.rank] = value
        self._computing.release()
        try:
            self._barrier.wait()
            values = list(self._exchanged)
            self._barrier.wait()
        finally:
            self._computing.acquire()
        return values

    def _gather_object(self, values: list[Any]) -> list[Any]:
        return [value for given in self._exchange(values) for value in given]

    def _gethostname(self) -> str:
        return f"machine {self._own.rank // self._num_local}"

    def _broadcast_object_list(self, values: list[Any]) -> list[Any]:
        return self._exchange(values)[0]

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor)[0].clone()
