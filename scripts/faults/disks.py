"""D1 and D2: a machine that loses power, and a disk that is full."""

import errno
import json
import os
import re
import resource
from collections.abc import Callable
from typing import Any

from tiny_run import TinyRun

from diffsynth_lite.training import saver
from diffsynth_lite.training.saver import Saver
from faults.bench import (
    PLAIN,
    PROVOKED,
    Bench,
    assert_same,
    at_call,
    fault,
    forked,
    launched,
    num_passed,
    torchrun,
    train,
    waited,
)
from faults.kills import at_each_call_of_a_save

CRASHES = "training/checkpoint/test_checkpoint_crashes.py"
POWER_CUTS = (
    f"{CRASHES}::test_a_power_cut_at_any_moment_leaves_the_old_checkpoint_or_the_new_one",
    f"{CRASHES}::test_without_any_one_of_its_syncs_a_save_could_be_lost",
)
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
LIMITED = (
    (Saver, "save", "checkpoint .*step-00000004 could not be written .* are free there"),
    (saver, "export_lora", r"no space left on the disk .*File too large.*\.lora-writing"),
)
"""Where a limit of the system strikes, and what the run then says."""


@fault("D1", "the old checkpoint or the new one; each sync needed")
def cut_the_power(_bench: Bench) -> str:
    """Power cut: each state of the disk after each call of a save."""
    return f"{num_passed(*POWER_CUTS)} tests"


@fault("D2", "exit 3 on all processes; earlier checkpoints good; continued bit for bit")
def fill_the_disk(bench: Bench) -> str:
    """Disk full: at each call of a save, by a limit of the system, and for one of 2 processes."""
    errors = bench.pick(ERRORS[:1], ERRORS[:1], ERRORS)
    stride = bench.pick(9, 2, 1)
    num_calls = 0
    for error in errors:
        run = bench.images(errno.errorcode[error])
        num_calls += at_each_call_of_a_save(run, stride, _failing(error), ended=lambda code: code == 3)
    for owner, name, message in LIMITED:
        _fill_a_real_one(bench.images(name), owner, name, message)
    if bench.scale != "ci":
        _fill_it_for_two(bench.images("two"))
    return f"{num_calls} calls, {len(LIMITED)} limits"


def _failing(error: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(error, os.strerror(error))

    return fail


def _fill_a_real_one(run: TinyRun, owner: Any, name: str, message: str) -> None:
    """A limit of the system from the second call of a function on: of the one that saves, or that exports."""
    whole, limited = run.root / "whole", run.root / "limited"
    assert train(run, whole, *PLAIN) == 0

    def work() -> int:
        with at_call(owner, name, 2, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))):
            return train(run, limited, *PLAIN)

    log = run.root / "log"
    assert waited(forked(work, log), 120) == 3
    assert re.search(message, log.read_text()), log.read_text()
    status = json.loads((limited / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 3), status
    assert train(run, limited, *PLAIN) == 0
    assert_same(whole, limited, 6)


def _fill_it_for_two(run: TinyRun) -> None:
    """The disk is full for the process that writes; all must stop with its message."""
    done = launched(
        run, torchrun(2, PROVOKED, "full_disk"), *PLAIN, "train.micro_batch_size=1", timeout_s=300
    )
    assert done.returncode != 0
    ends = sorted((run.root / "run").parent.glob("end-*"))
    texts = [path.read_text() for path in ends]
    assert len(texts) == 2, done.stderr
    assert all("3 checkpoint" in text and "No space left on device" in text for text in texts), texts
