"""A step that takes too long shows where it is, and processes do not wait for ever."""

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed
import torch.multiprocessing
from accelerate import Accelerator

from diffsynth_lite.training.distributed import Watchdog

SLOW = """
import sys, time
from datetime import timedelta
from types import SimpleNamespace
from diffsynth_lite.training.distributed import Watchdog

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


def stacks(seconds: float, what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SLOW, str(seconds), what], capture_output=True, text=True, check=True
    )
    return done.stderr


def test_a_step_that_takes_too_long_writes_where_it_is() -> None:
    assert "hang_in_a_step" in stacks(0.5, "hang")


def test_what_may_take_long_and_steps_in_time_write_nothing() -> None:
    assert stacks(0.5, "preview") == ""
    assert stacks(60, "hang") == ""


def wait_for_one_that_hangs(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    accelerator = Accelerator(cpu=True)
    watchdog = Watchdog(accelerator, timedelta(seconds=2))
    with watchdog.watching():
        accelerator.reduce(torch.ones(1))
        with watchdog.paused():
            time.sleep(3 * rank)  # longer than a step may take
            accelerator.reduce(torch.ones(1))
        if rank == 1:
            time.sleep(30)
        started = time.monotonic()
        try:
            accelerator.reduce(torch.ones(1))
        except RuntimeError:
            assert time.monotonic() - started < 20
        else:
            raise AssertionError("rank 0 waited for one that hangs")
    torch.distributed.destroy_process_group()


def test_a_process_gives_up_on_one_that_hangs_but_not_on_one_that_draws() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=wait_for_one_that_hangs, args=(rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(60)
        assert ranks[0].exitcode == 0
    finally:
        ranks[1].kill()
        ranks[1].join()
