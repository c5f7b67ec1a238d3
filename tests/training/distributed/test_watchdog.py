"""A step that takes too long shows where it is, and processes do not wait for ever."""

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed
from accelerate import Accelerator
from processes import FORKED, LIMIT_S, Program, free_port

from diffsynth_lite.training.distributed.watchdog import Watchdog

SLOW = """
import sys, time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from diffsynth_lite.training.distributed.watchdog import Watchdog

def hang_in_a_step():
    while not Path(sys.argv[1]).stat().st_size:
        time.sleep(0.01)

with Watchdog(SimpleNamespace(num_processes=1), timedelta(seconds=0.1)).watching():
    hang_in_a_step()
"""


def test_a_step_that_takes_too_long_writes_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    program = Program(tmp_path / "slow.py", [str(tmp_path / "printed")], tmp_path / "printed")
    assert program.wait() == 0
    assert "hang_in_a_step" in program.printed()


def test_steps_in_time_and_pauses_of_any_length_write_nothing(alarm) -> None:
    watchdog = Watchdog(SimpleNamespace(num_processes=1), timedelta(seconds=10))
    with watchdog.watching():
        for _ in range(3):
            alarm.sleep(7.0)
            with watchdog.paused():
                alarm.sleep(100.0)
            alarm.sleep(7.0)
            watchdog.reset()
        assert alarm.num_dumps == 0
        alarm.sleep(9.0)
    assert alarm.num_dumps == 1
    alarm.sleep(100.0)
    assert alarm.num_dumps == 1


def wait_for_one_that_hangs(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    accelerator = Accelerator(cpu=True)
    watchdog = Watchdog(accelerator, timedelta(seconds=2))
    accelerator.wait_for_everyone()  # one of them may take long to start
    with watchdog.watching():
        accelerator.reduce(torch.ones(1))
        with watchdog.paused():
            time.sleep(3 * rank)  # longer than a step may take
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


def test_a_process_gives_up_on_one_that_hangs_but_not_on_one_that_pauses() -> None:
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
