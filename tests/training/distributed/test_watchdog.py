"""A step that takes too long shows where it is, and processes do not wait for ever."""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from accelerate import Accelerator
from processes import FORKED, LIMIT_S, Program, free_port

from diffsynth_lite.training.distributed.watchdog import Watchdog

SLOW = """
import sys, time
from datetime import timedelta
from types import SimpleNamespace
from diffsynth_lite.training.distributed.watchdog import Watchdog

watchdog = Watchdog(SimpleNamespace(num_processes=1), timedelta(seconds=float(sys.argv[1])))

def hang_in_a_step():
    time.sleep(1.0)

with watchdog.watching():
    with watchdog.paused():
        time.sleep(1.0)
    if sys.argv[2] == "hang":
        hang_in_a_step()
time.sleep(0.2)
"""


def stacks(folder: Path, seconds: float, what: str) -> str:
    (folder / "slow.py").write_text(SLOW)
    program = Program(folder / "slow.py", [str(seconds), what], folder / f"{what} {seconds}")
    assert program.wait() == 0
    return program.printed()


def test_a_step_that_takes_too_long_writes_where_it_is(tmp_path: Path) -> None:
    assert "hang_in_a_step" in stacks(tmp_path, 0.5, "hang")


def test_what_may_take_long_and_steps_in_time_write_nothing(tmp_path: Path) -> None:
    assert stacks(tmp_path, 0.5, "preview") == ""
    assert stacks(tmp_path, 60, "hang") == ""


def wait_for_one_that_hangs(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    accelerator = Accelerator(cpu=True)
    watchdog = Watchdog(accelerator, timedelta(seconds=4))
    with watchdog.watching():
        accelerator.reduce(torch.ones(1))
        with watchdog.paused():
            time.sleep(6 * rank)  # longer than a step may take
            accelerator.reduce(torch.ones(1))
        if rank == 1:
            time.sleep(LIMIT_S)
        try:
            accelerator.reduce(torch.ones(1))
        except RuntimeError:
            pass
        else:
            raise AssertionError("rank 0 waited for one that hangs")
    torch.distributed.destroy_process_group()


def test_a_process_gives_up_on_one_that_hangs_but_not_on_one_that_draws() -> None:
    port = free_port()
    ranks = [FORKED.Process(target=wait_for_one_that_hangs, args=(rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(LIMIT_S)
        assert ranks[0].exitcode == 0
    finally:
        ranks[1].kill()
        ranks[1].join()
