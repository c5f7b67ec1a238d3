"""Saves checkpoints in a tight loop in a child that is killed at a random moment, again and again."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NoReturn

import torch

from diffsynth_lite.training.checkpoint.store import CheckpointStore


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(256, 64, generator=torch.Generator().manual_seed(step))}


def save_for_ever(folder: Path, acknowledge: int) -> NoReturn:
    store = CheckpointStore(folder, keep=2)
    store.clean()
    checkpoint = store.latest()
    step = checkpoint.step if checkpoint else 0
    while True:
        step += 1
        store.save(step, {"adapter": weights(step), "optimizer": weights(-step)}, {"state": {"step": step}})
        os.write(acknowledge, step.to_bytes(8, "big"))


def kill_one(folder: Path, *, num_saves: float) -> list[int]:
    """Steps that a child acknowledged before it was killed, about ``num_saves`` saves after its second."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, send)
        finally:
            os._exit(1)
    os.close(send)
    with os.fdopen(receive, "rb") as acknowledged:
        steps = acknowledged.read(8)
        first_at = time.monotonic()
        steps += acknowledged.read(8)
        time.sleep(num_saves * (time.monotonic() - first_at))
        os.kill(child, signal.SIGKILL)
        steps += acknowledged.read()
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return [int.from_bytes(steps[start : start + 8], "big") for start in range(0, len(steps), 8)]


def check(folder: Path, last_acknowledged: int) -> None:
    checkpoint = CheckpointStore(folder, keep=2).latest()
    assert checkpoint is not None
    # The child may have been killed between the last save and its acknowledgement.
    assert checkpoint.step in (last_acknowledged, last_acknowledged + 1)
    assert checkpoint.documents == {"state": {"step": checkpoint.step}}
    assert torch.equal(checkpoint.tensors("adapter")["weight"], weights(checkpoint.step)["weight"])
    assert torch.equal(checkpoint.tensors("optimizer")["weight"], weights(-checkpoint.step)["weight"])
    assert not list(folder.glob(".bad-*"))


def kill_again_and_again(folder: Path) -> None:
    """Twenty times, in a process without threads, as each child is a fork of it."""
    torch.set_num_threads(1)
    dice = random.Random(0)
    for _ in range(20):
        check(folder, kill_one(folder, num_saves=dice.uniform(0, 2))[-1])
