"""This file has Ray Train start the processes of a run on several nodes, and again when a node is lost.

Not Ray's placement groups with torch's rendezvous: an elastic agent restarts processes only while the machine
with its rendezvous is there, and hides their exit codes. Ray Train gives us the nodes and their order, and
starts the group again on those that there are; a process is ``train``, as torchrun would start it.
"""

import json
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from diffsynth_lite.cluster.node import COMMAND_VARIABLE, WRONG_INPUT, Ended, TaskFailedError, start
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.queue.locks import is_locked
from diffsynth_lite.run_folder.folder import REQUEST_FILES, RunFolder

_FINAL = (0, WRONG_INPUT, 3, 75)
"""Exit codes of ``train`` after which it is not started again: finished, refused, stopped."""
_PORTS = range(20_000, 32_768)
"""Between those of Ray's workers and those that Linux gives to connections, which may take one before the
processes listen there."""
_POLL_S = 0.2
_TOGETHER_S = 10.0
"""Time in which the processes of all nodes end for one reason."""
_LOCK_S = 120.0
"""Time in which a node that Ray has lost ends its processes, which hold the lock of the run; NFS keeps locks
of a machine that is gone for 90 s."""


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A run of several nodes.

    Attributes:
        command: that somebody typed, which goes on with the run.
        words: of ``train``, after its name, with paths that all nodes see.
        folder: that its processes are started in.
        run_folder: as all nodes see it.
        num_nodes: that train together; of fewer, ``min_nodes`` will do.
        processes: of each node, one a GPU.
        failures: after which the run is not started again.
    """

    command: str
    words: Sequence[str]
    folder: str
    run_folder: str
    num_nodes: int
    min_nodes: int
    processes: int
    failures: int


def train_on_cluster(ray: Any, request: TrainingRequest, needs: Mapping[str, float]) -> None:
    """Train on the nodes of a cluster until the run ends; the first signal has it save and stop.

    Args:
        needs: of each node, by the names that the cluster gave them.

    Raises:
        UserError: the run was refused.
        RunStoppedError: it had to stop, or failed too often.
        RunInterrupted: somebody asked it to stop, and it stopped.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # On the node of this process: another one may be lost.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    refused = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    run, least, most = RunFolder(Path(request.run_folder)), request.min_nodes, request.num_nodes
    with ExitStack() as scope:
        # Ray's own record is of no use to other nodes, as no checkpoint is in it.
        record = scope.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        # Not TorchTrainer, which joins its own workers: the processes that they start meet by themselves.
        trainer = DataParallelTrainer(
            _train_here,
            train_loop_config={"request": request, "before": _checkpoints(run), "refused": refused},
            scaling_config=ScalingConfig(
                num_workers=most if least == most else (least, most),
                use_gpu="GPU" in needs,
                resources_per_worker=dict(needs),
                placement_strategy="SPREAD",
            ),
            run_config=RunConfig(
                name=run.path.name,
                storage_path=record,
                failure_config=FailureConfig(max_failures=request.failures),
            ),
        )
        pool = ThreadPoolExecutor(1)  # Outside of the main thread Ray leaves the signals alone.
        scope.callback(pool.shutdown, wait=False)
        ask = scope.enter_context(_asked_by_signals(run))
        try:
            _wait_for_end(pool.submit(trainer.fit), ask, refused)
        except TrainingFailedError as error:
            reason = str(error).strip().splitlines()[-1].rpartition(f"{TaskFailedError.__name__}: ")[2]
            raise RunStoppedError(
                f"the run failed more than {request.failures} times, last with: {reason}; the same command "
                "goes on from its last checkpoint"
            ) from error
        except ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise RunStoppedError(
                f"the cluster was lost: {reason}; the same command goes on from the last checkpoint"
            ) from error


def _wait_for_end(fitting: Future[Any], ask: Callable[[], None], refused: Any) -> None:
    """Wait until the run has ended, or a process of it was refused, and raise as it ended."""
    while not wait([fitting], timeout=_POLL_S).done:
        ask()
        if not refused.empty():
            # Where all were refused, all have ended; one that was is waited for by the others.
            wait([fitting], timeout=_TOGETHER_S)
            raise_as_it_ended(refused.get())
    raise_as_it_ended(fitting.result().return_value)


def _checkpoints(run: RunFolder) -> set[str]:
    with suppress(OSError):
        return {path.name for path in run.checkpoints_folder.iterdir()}
    return set()


def raise_as_it_ended(ended: Ended) -> None:
    """Raise what ends this command as the run ended; nothing where it finished."""
    kinds: dict[int, type[BaseException]] = {WRONG_INPUT: UserError, 3: RunStoppedError, 75: RunInterrupted}
    if kind := kinds.get(ended.exit_code):
        raise kind(f"{ended.node}: {ended.last_line}")


@contextmanager
def _asked_by_signals(run: RunFolder) -> Iterator[Callable[[], None]]:
    """Scope in which the first signal asks the run to save and stop, and the second one ends this process.

    Yields what is to be called again and again: a run that starts removes a request that it finds.
    """
    file, asked = run.path / REQUEST_FILES["stop"], list[int]()

    def stop(number: int, _frame: FrameType | None) -> None:
        if asked or not run.path.is_dir():
            raise RunInterrupted(f"{signal.Signals(number).name}: the run is ended without a save")
        asked.append(number)
        ask()

    def ask() -> None:
        if asked:
            with suppress(FileNotFoundError):  # somebody removed the folder, which ends the run, too
                file.touch()

    numbers = [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield ask
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked:
            file.unlink(missing_ok=True)


def _train_here(config: dict[str, Any]) -> Ended:
    """On a node: run the processes of the node until they have ended, and return how.

    Raises:
        TaskFailedError: they ended in a way that another start may mend.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    request: TrainingRequest = config["request"]
    context, run = get_context(), RunFolder(Path(request.run_folder))
    node, num_nodes = context.get_world_rank(), context.get_world_size()
    if node == 0:
        wait_for_lock(run.lock_file)
    address = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port()) if node == 0 else None)
    words = list(request.words)
    if _checkpoints(run) - config["before"]:
        words += ["--resume", "auto"]  # whatever the first start was to resume from
    with TemporaryDirectory() as folder, ExitStack() as children:
        started = []
        for local_rank in range(request.processes):
            variables = {
                "TORCHELASTIC_ERROR_FILE": f"{folder}/{local_rank}",
                COMMAND_VARIABLE: request.command,
            }
            if num_nodes * request.processes > 1:  # One process is a run of this machine, bit for bit.
                variables |= {
                    "MASTER_ADDR": address[0],
                    "MASTER_PORT": str(address[1]),
                    "WORLD_SIZE": str(num_nodes * request.processes),
                    "RANK": str(node * request.processes + local_rank),
                    "LOCAL_WORLD_SIZE": str(request.processes),
                    "LOCAL_RANK": str(local_rank),
                }
            child = start(["diffsynth_lite.cli.train", *words], request.folder, variables=variables)
            children.callback(child.kill)
            started.append(child)
        code, first = _end_of(started)
        message = error_of(Path(folder, str(first)))
    name = socket.gethostname()
    if code not in _FINAL:
        raise TaskFailedError(f"exit code {code} on {name}: {message or 'it left no message'}")
    ended = Ended(name="run", node=name, exit_code=code, last_line=message)
    if ended.exit_code == WRONG_INPUT:
        config["refused"].put(ended)
    return ended


def wait_for_lock(file: Path, limit_s: float = _LOCK_S) -> None:
    """Wait until no process of an earlier start holds the lock of a run, or for so long."""
    end = time.monotonic() + limit_s
    with suppress(OSError):  # a file system without locks
        while is_locked(file) and time.monotonic() < end:
            time.sleep(_POLL_S)


def free_port() -> int:
    """A port of this node, where the processes of all nodes meet."""
    for port in secrets.SystemRandom().sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.socket() as found:
            found.bind(("", port))
            return port
    raise TaskFailedError("no port is free")


def _end_of(children: Sequence["subprocess.Popen[str]"]) -> tuple[int, int]:
    """Wait for the processes of this node; the code of the first that failed, and which one it was.

    After that the others have some time to end for the same reason. Both are 0 where none failed.
    """
    while (codes := [child.poll() for child in children]).count(None) and not any(codes):
        time.sleep(_POLL_S)
    first = next((place for place, code in enumerate(codes) if code), 0)
    end = time.monotonic() + _TOGETHER_S
    while None in [child.poll() for child in children] and time.monotonic() < end:
        time.sleep(_POLL_S)
    return codes[first] or 0, first


def error_of(file: Path) -> str:
    """The last line of the error that a process left for its launcher; empty where it left none."""
    try:
        text = json.loads(file.read_text())["message"]["message"]
    except (OSError, ValueError, KeyError):
        return ""
    return str(text).strip().rpartition("\n")[2]
