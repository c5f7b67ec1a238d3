"""The queue of a workspace for tests: entries, workers, and small programs that stand for ``train``."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from processes import FORKED, wait_for

from diffsynth_lite.queue.entry import Entry, QueuedRun, QueueState
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.queue.worker import Worker
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.jobs import Jobs
from diffsynth_lite.workspace import Workspace

STATUS = 'printf \'{"state": "%s", "exit_code": %s, "message": "%s", "found_at": {}}\' >$RUN/status.json; '
STARTED = "mkdir -p $RUN; echo $NAME $CUDA_VISIBLE_DEVICES >>started; "
FINISHED = f"{STATUS % ('finished', 0, '')} exit 0"
PROGRAMS = {
    "quick": FINISHED,
    "refused": "echo 12:34:56 lora.rank: is wrong; exit 2",
    "starting": "exec sleep 60",
    "broken": "echo Traceback; echo it broke; exit 1",
    "failed": f"{STATUS % ('failed', 1, 'a bug')} exit 1",
    "stopped": f"{STATUS % ('interrupted', 75, 'stopped by STOP')} exit 75",
    "full": f"{STATUS % ('stopped', 3, 'no space left on the disk')} exit 3",
    # Until the test lets it end, or for a minute.
    "long": f"{STATUS % ('running', 'null', 'training')}"
    f"for i in $(seq 3000); do if [ -e $RUN/end ]; then {FINISHED}; fi; sleep 0.02; done",
}
"""What a run does, by the first word of its name."""


def fake_command(entry: Entry) -> list[str]:
    """A program in place of ``train``: the one that the run's name begins with."""
    name = Path(entry.folder).name
    program = f"RUN={entry.folder}; NAME={name}; {STARTED}{PROGRAMS[name.partition('-')[0]]}"
    return ["sh", "-c", program]


def work(path: Path) -> None:
    """A worker in a process of its own."""
    os.chdir(path)
    Worker(Queue(Workspace(path)), command=fake_command, poll_s=0.01).work()


@dataclass(frozen=True)
class Waiting:
    """A queue with what tests do to it."""

    queue: Queue

    @property
    def path(self) -> Path:
        return self.queue.workspace.path

    def add(self, *names: str, device: str = "", num_processes: int = 1) -> list[QueuedRun]:
        """Queue runs of these names."""
        return self.queue.add(
            [
                Entry(
                    config="configs/mine.yaml",
                    folder=f"runs/{name}",
                    device=device,
                    num_processes=num_processes,
                )
                for name in names
            ]
        )

    def names(self, state: QueueState) -> list[str]:
        return [run.name for run in self.queue.snapshot().in_state(state)]

    def outcomes(self) -> dict[str, tuple[str, int | None]]:
        """Outcome and exit code of those that are done, by name."""
        done = self.queue.snapshot().in_state("done")
        return {run.name: (run.entry.outcome, run.entry.exit_code) for run in done if run.entry}

    def started(self) -> list[str]:
        """Each run that was started with its device, in this order."""
        file = self.path / "started"
        return file.read_text().splitlines() if file.exists() else []

    def await_start(self, *names: str) -> None:
        """Until these runs train."""
        runs = [RunFolder(self.path / "runs" / name) for name in names]
        wait_for(lambda: all(run.read_status() is not None for run in runs))

    def end(self, name: str) -> None:
        """Let a long run finish."""
        (self.path / "runs" / name / "end").touch()

    def work(self) -> None:
        """Work here until there is nothing to do."""
        Worker(self.queue, command=fake_command, poll_s=0.01).work()

    def work_as_the_command_does(self) -> None:
        """The same, while nobody has a model write captions."""
        holders = Jobs(self.queue.workspace).holders
        Worker(self.queue, command=fake_command, holders=holders, poll_s=0.01).work()

    @contextmanager
    def working(self) -> Iterator[ForkServerProcess]:
        """Scope with a worker in a process of its own; afterwards it has ended by itself."""
        worker = FORKED.Process(target=work, args=(self.path,))
        worker.start()
        try:
            wait_for(lambda: self.queue.is_worked() or not worker.is_alive())
            yield worker
            wait_for(lambda: not worker.is_alive())
        finally:
            worker.kill()
            worker.join()
            self.kill_runs()

    def kill_runs(self) -> None:
        """As a power cut does, with what they have started."""
        for run in self.queue.in_state("running"):
            process = Process.from_text(run.entry.process) if run.entry else None
            if process is not None and process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                wait_for(lambda run=run: not self.is_alive(run))

    def is_alive(self, run: QueuedRun) -> bool:
        with self.queue.changing():
            return self.queue.is_alive(run)

    def in_thread(self) -> threading.Thread:
        """A worker in a thread, which has been started."""
        thread = threading.Thread(target=self.work)
        thread.start()
        return thread
