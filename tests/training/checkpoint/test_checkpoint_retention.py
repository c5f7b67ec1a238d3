"""Which checkpoints stay."""

from pathlib import Path

import torch

from diffsynth_lite.training.checkpoint.store import CheckpointStore


def test_a_pinned_step_and_those_of_every_so_many_stay_besides_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_every=4)
    for step in range(1, 4):
        store.pinned = 2
        store.save(step, {"adapter": {"a": torch.ones(2)}}, {"state": {"step": step}})
    for step in range(4, 8):
        store.pinned = 5 if step >= 5 else 2
        store.save(step, {"adapter": {"a": torch.ones(2)}}, {"state": {"step": step}})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (4, 5, 7)]
