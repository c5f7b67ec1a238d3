"""N1: a run on two machines, pretended on this one, that share neither run folder nor cache."""

import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import free_port
from tiny_run import TinyRun

from faults.bench import PLAIN, Bench, assert_same, fault, started, wait_until

GONE_WITHIN_S = 20.0
"""Between the end of the first launcher and that of the last. One that waits for the other in vain gives up
after 5 minutes."""
_LIMIT_S = 600.0
_EXIT_CODE = re.compile(r"exitcode +: (-?\d+)")
"""Of a trainer, in the report of its launcher."""
_ENDED_BY_LAUNCHER = "-15"
"""It ends those that have not yet left when the first one of its machine has."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run on two machines ended.

    Attributes:
        codes: of the launchers.
        logs: what each of them and its trainers printed.
        seconds: between the end of the first launcher and that of the last.
    """

    codes: Sequence[int]
    logs: Sequence[str]
    seconds: float

    def assert_refused(self, words: str) -> None:
        """All trainers ended with exit code 2, soon after each other, and each machine's log says why."""
        assert self.seconds < GONE_WITHIN_S, self.seconds
        for log in self.logs:
            assert words in log, log
            assert_refused(log)


def assert_refused(log: str) -> None:
    """The report of a launcher says that its trainers ended with exit code 2."""
    codes = set(_EXIT_CODE.findall(log)) - {_ENDED_BY_LAUNCHER}
    assert codes == {"2"}, log


def launched_on(
    run: TinyRun,
    machines: Sequence[Path],
    *settings: str,
    script: Sequence[str] = ("train.py",),
    num_processes: int = 2,
) -> Ended:
    """Start a launcher with so many processes for each machine, with folders of its own; wait for all."""
    meeting = ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    launchers, logs = [], []
    for rank, machine in enumerate(machines):
        own = (f"data.path={machine / 'data'}", f"data.cache_dir={machine / 'cache'}")
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(machines))),
            *("--node_rank", str(rank), "--nproc_per_node", str(num_processes), *meeting, *script),
        )
        logs.append(machine / f"log of {rank}")
        logs[-1].unlink(missing_ok=True)
        launchers.append(
            started(run, command, *own, f"output.dir={machine / 'run'}", *settings, log=logs[-1])
        )
    ended_at = []
    for num_ended in range(1, len(launchers) + 1):
        wait_until(
            lambda number=num_ended: sum(one.poll() is not None for one in launchers) >= number,
            f"the end of {num_ended} of {logs}",
            _LIMIT_S,
        )
        ended_at.append(time.monotonic())
    return Ended(
        codes=[one.returncode for one in launchers],
        logs=[log.read_text(errors="replace") for log in logs],
        seconds=ended_at[-1] - ended_at[0],
    )


@fault(
    "N1",
    "equal to the run with shared folders; what is refused is with its reason on both, exit code 2, all"
    " gone within 20 s",
)
def share_no_folders(bench: Bench) -> str:
    """2 machines of 2 processes that share neither run folder nor cache nor data: started, started again when
    finished, continued; the main process elsewhere, no data, no run folder.
    """
    run = bench.images()
    run = run.having(*PLAIN, "train.micro_batch_size=1")
    shared, first, second = (run.root / name for name in ("shared", "first", "second"))
    for machine in (shared, first, second):
        shutil.copytree(run.root / "data", machine / "data")
    done = launched_on(run, [shared, shared], "train.steps=4")
    assert done.codes == [0, 0], done.logs
    assert "run is shared by the 2 machines" in done.logs[0]

    ended = []
    for steps in (2, 2, 4):  # the first start, the finished run once more, and the run continued
        ended.append(launched_on(run, [first, second], f"train.steps={steps}"))
        assert ended[-1].codes == [0, 0], ended[-1].logs
        assert "run is not shared by the 2 machines" in ended[-1].logs[0]
    assert_same(shared / "run", first / "run", 4)
    assert not (second / "run").exists()
    assert _entries(shared) == _entries(first) == _entries(second)

    ended.append(launched_on(run, [second, first], "train.steps=6"))
    ended[-1].assert_refused("has a checkpoint of step 4 in its own")
    shutil.rmtree(second / "data")
    ended.append(launched_on(run, [first, second], "train.steps=6"))
    ended[-1].assert_refused(str(second / "data"))
    shutil.rmtree(first / "run")
    shutil.copytree(first / "data", second / "data")
    ended.append(launched_on(run, [first, second], "train.steps=6", "--resume", "must"))
    ended[-1].assert_refused("no checkpoint")
    longest = max(one.seconds for one in ended)
    return f"5 starts, 3 refused, the second launcher gone {longest:.1f} s after the first at most"


def _entries(machine: Path) -> dict[str, bytes]:
    """The entries of a machine's cache."""
    return {path.name: path.read_bytes() for path in (machine / "cache").rglob("*.safetensors")}
