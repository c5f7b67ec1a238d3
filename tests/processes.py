"""Processes that tests start: forked from one that has imported the libraries, and with one limit of time."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import socket
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

if sys.platform != "win32":
    import resource

import torch.distributed
import torch.multiprocessing

LIMIT_S = 1800.0
"""How long a test waits for a process; only to end one that hangs. A busy machine may take a hundred times as
long as an idle one."""

NUM_RANKS = 2
"""Processes of ``on_ranks``."""

FORKED = multiprocessing.get_context("forkserver")
"""Starts processes in which the libraries are there: to import them takes 5 s of a processor."""
PRELOADED = ("diffsynth_lite.pipelines.qwen_image", "diffsynth_lite.training.run")
FORKED.set_forkserver_preload(list(PRELOADED))
_spawn = util.spawnv_passfds


def start_fork_server() -> None:
    """Fork the server of ``FORKED`` from this process, with all that this one has imported.

    Called before the first test; otherwise the server is another interpreter, which imports it all again.
    """
    if sys.platform != "linux":
        return
    for name in PRELOADED:
        importlib.import_module(name)
    resource_tracker.ensure_running()
    with mock.patch("multiprocessing.util.spawnv_passfds", _fork_server):
        forkserver.ensure_running()


def _fork_server(_path: str, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Run the program behind ``-c`` in a fork that keeps only the file descriptors passed; its number."""
    child = os.fork()
    if child:
        return child
    try:
        util.spawnv_passfds = _spawn
        faulthandler.disable()
        reset_warnings()
        for number in _open_numbers() - {0, 1, 2, *passed, *_files()}:
            os.close(number)
        _show_in(2)
        # Forked while it was held.
        forkserver._forkserver._lock = threading.Lock()
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def reset_warnings() -> None:
    """Show them as a new interpreter does; in tests they are errors."""
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


@contextmanager
def few_files(num_free: int) -> Iterator[None]:
    """Scope in which this process, and those that it starts, can open only so many more files."""
    held, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _open_numbers()
    free = (number for number in range(held) if number not in taken)
    limit = next(islice(free, num_free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held, most))


def _open_numbers() -> set[int]:
    """File descriptors of this process."""
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def _files() -> set[int]:
    """Those of files, which are what pytest takes for the screen, if tests have not opened others."""
    return {number for number in _open_numbers() if stat.S_ISREG(os.fstat(number).st_mode)}


def _show_in(descriptor: int) -> None:
    """Let what libraries took for the screen when they were imported be another one."""
    for number in _files() - {descriptor}:
        os.dup2(descriptor, number)


class Program:
    """A Python program that runs in forked processes, each with a number as torchrun gives it.

    Args:
        script: path of the program.
        arguments: of its command line.
        log: file for what it prints.
        num_processes: several find each other as those of one machine.
        variables: of the environment, next to those of this process.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        log: Path,
        *,
        num_processes: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        log.touch()
        shared = dict(os.environ) | dict(variables or {})
        if num_processes > 1:
            shared |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._processes = []
        for rank in range(num_processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_processes > 1 else {}
            process = FORKED.Process(target=_run, args=(str(script), list(arguments), str(log), shared | own))
            process.start()
            self._processes.append(process)

    @property
    def pid(self) -> int:
        """Of the first process, which is also the number of its process group."""
        return self._processes[0].pid or 0

    def printed(self) -> str:
        """What all processes have printed until now."""
        return self._log.read_text(errors="replace")

    def read_until(self, text: str) -> None:
        """Wait for a text; it is an error that a process ends before."""
        wait_for(lambda: text in self.printed() or not self._processes[0].is_alive())
        assert text in self.printed(), self.printed()

    def wait(self) -> int:
        """The exit code: of the first process that failed, else 0."""
        end = time.monotonic() + LIMIT_S
        for process in self._processes:
            process.join(end - time.monotonic())
        codes = [process.exitcode for process in self._processes]
        if None in codes:
            self.kill()
            raise AssertionError(f"still running after {LIMIT_S} s:\n{self.printed()}")
        return next((code for code in codes if code), 0)

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()
            process.join()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; a look may take a server's time, so that they are less and less often."""
    end, pause_s = time.monotonic() + LIMIT_S, 0.005
    while not condition():
        assert time.monotonic() < end, f"not so after {LIMIT_S} s"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.05)


def on_ranks(work: Callable[..., None], *arguments: object, num_ranks: int = NUM_RANKS) -> None:
    """Call a function, with its rank first, in the processes of a gloo group; raises the error of one."""
    with tempfile.TemporaryDirectory() as folder:
        group = f"file://{folder}/rendezvous", num_ranks
        torch.multiprocessing.start_processes(
            _on_rank, (work, arguments, *group), nprocs=num_ranks, start_method="forkserver"
        )


def _on_rank(
    rank: int, work: Callable[..., None], arguments: Sequence[object], rendezvous: str, num_ranks: int
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    work(rank, *arguments)
    # Wrapped models go before their process group: as its last owner one can deadlock in torch's destructor.
    gc.collect()
    torch.distributed.destroy_process_group()


@contextmanager
def group_of_one() -> Iterator[torch.distributed.ProcessGroup]:
    """A gloo group of this process only: what is sharded is all there, but comes and goes with its block."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert group is not None
        yield group
    finally:
        gc.collect()
        torch.distributed.destroy_process_group()


def free_port() -> int:
    """One below those that Linux takes for connections: with many of these it lost one before it was used."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def kill_children() -> None:
    """End what a test that failed has left."""
    for process in multiprocessing.active_children():
        if isinstance(process, ForkServerProcess):
            process.kill()
            process.join()


def _run(script: str, arguments: list[str], log: str, variables: dict[str, str]) -> None:
    gc.freeze()  # a run looks for garbage a few times, among all that is imported
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    if sys.platform == "linux":
        _show_in(descriptor)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(Path(__file__).parents[1])
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
