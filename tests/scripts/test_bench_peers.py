"""The benchmark sets loops beside the trainer that do the same work, and tells where one does not."""

from pathlib import Path
from types import SimpleNamespace

import peers
import pytest
import torch
from torch import Tensor, nn


def test_all_loops_learn_the_same_and_are_timed_and_measured_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers.compare(peers.parse_arguments(["--quick", "--modes", "plain"]), tmp_path)
    numbers, times = (table.splitlines() for table in capsys.readouterr().out.split("CPU time of a step"))
    same = [line for line in numbers if "0e+00, 0e+00" in line]
    names = (peers.TRAINER, peers.BASE, peers.IN_MEMORY, peers.DIFFUSERS, peers.DIFFUSERS + peers.FUSED)
    assert all(any(line.startswith(f"| {name} ") for line in same) for name in names)
    assert sum("[" in line for line in times) >= len(names) - 1  # the bare loop is what the others are over

    offload, script = (
        peers.measure_alone(
            peers.parse_arguments(["--alone", name, "--modes", mode, "--folder", str(tmp_path)])
        )
        for name, mode in ((peers.TRAINER, "offload"), (peers.DIFFUSERS, "plain"))
    )
    assert script[2] > 2 * offload[2]


def test_a_loop_that_does_other_work_is_not_timed() -> None:
    class Linear:
        def __init__(self, scale: float) -> None:
            self.model = nn.Linear(2, 1)
            self._scale = scale

        def loss(self, _batch: object, sigma: Tensor) -> Tensor:
            return self._scale * self.model(sigma.expand(1, 2)).square().sum()

    batch = SimpleNamespace(uniform=torch.tensor([0.5]))
    with pytest.raises(SystemExit, match="trainer: loss and gradients are"):
        peers.differences_of({peers.TRAINER: Linear(1.01), peers.BASE: Linear(1.0)}, batch)
    off = peers.differences_of({peers.DIFFSYNTH: Linear(1.01), peers.BASE: Linear(1.0)}, batch)
    assert off[peers.DIFFSYNTH] == pytest.approx((0.01, 0.01), rel=1e-3)


def test_a_ratio_is_of_rounds_with_the_interval_of_its_median() -> None:
    assert peers.ratio_of([2.0, 4.0, 9.0], [2.0, 2.0, 3.0]) == "2.000 [1.000, 3.000]"
