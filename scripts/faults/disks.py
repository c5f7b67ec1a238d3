"""D2: a disk that is full."""

import errno
import os
import re
import resource
from collections.abc import Callable
from typing import Any

from diffsynth_lite.training import saver
from diffsynth_lite.training.saver import Saver
from faults.bench import PLAIN, PROVOKED, Bench, Run, assert_ended, assert_same, at_call, fault, torchrun
from faults.kills import at_each_call_of_a_save

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
LIMITED = (
    (Saver, "save", "checkpoint .*step-00000004 could not be written .* are free there"),
    (saver, "export_lora", r"no space left on the disk .*File too large.*\.lora-writing"),
)
"""Where a limit of the system strikes, and what the run then says."""


@fault("D2", "exit 3 on all processes; earlier checkpoints good; continued bit for bit")
def fill_the_disk(bench: Bench) -> str:
    """Disk full: at each call of a save, by a limit of the system, and for one of 2 processes."""
    errors = bench.pick(ERRORS[:1], ERRORS[:1], ERRORS)
    stride = bench.pick(9, 2, 1)
    num_calls = 0
    for error in errors:
        run = bench.images(name=errno.errorcode[error])
        num_calls += at_each_call_of_a_save(run, stride, _failing(error), code=3)
    for owner, name, message in LIMITED:
        _fill_a_real_one(bench.images(name=name), owner, name, message)
    if bench.scale != "ci":
        _fill_it_for_two(bench.images(name="two"))
    return f"{num_calls} calls, {len(LIMITED)} limits"


def _failing(error: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(error, os.strerror(error))

    return fail


def _fill_a_real_one(run: Run, owner: Any, name: str, message: str) -> None:
    """A limit of the system from the second call of a function on: of the one that saves, or that exports."""
    run = run.having(*PLAIN)
    whole, limited = run.finish("whole"), run.root / "limited"

    def start() -> int:
        with at_call(owner, name, 2, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))):
            return run.exit_code(limited)

    assert run.in_child(start, 120) == 3
    assert re.search(message, run.log.read_text()), run.log.read_text()
    assert_ended(limited, "stopped", 3)
    assert_same(whole, run.finish(limited), 6)


def _fill_it_for_two(run: Run) -> None:
    """The disk is full for the process that writes; all must stop with its message."""
    done = run.launched(torchrun(2, PROVOKED, "full_disk"), *PLAIN, "train.micro_batch_size=1", timeout=300)
    assert done.returncode != 0
    texts = [path.read_text() for path in run.root.glob("end-*")]
    assert len(texts) == 2, done.stderr
    assert all("3 checkpoint" in text and "No space left on device" in text for text in texts), texts
