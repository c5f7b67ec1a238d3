"""A step takes what its streams take, worked out by hand at one byte a second."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffsynth_lite.core.gradient import BlockPolicy, GradientEngine, block_runner, gradient_engine
from diffsynth_lite.core.transfer.backends import Copy, PlainBackend
from diffsynth_lite.core.weights import WeightStream
from diffsynth_lite.training.planning.device_speed import DeviceSpeed
from diffsynth_lite.training.planning.schedule import BlockTime, Sending, simulated

SPEED = DeviceSpeed(
    product_flops={torch.float32: 1.0},
    attention_ratio=1.0,
    attention_backward_ratio=1.0,
    memory_bytes=1.0,
    dequantised_bytes=1.0,
    to_host_bytes=1.0,
    to_device_bytes=1.0,
    launch_seconds={},
)
KEPT = BlockTime(forward=2.0, recompute=0.0, backward=4.0)
AGAIN = replace(KEPT, recompute=2.0)
SMALL, LARGE = (replace(AGAIN, sent=(Sending(size, after=0.0),)) for size in (2, 3))
LATE = replace(AGAIN, sent=(Sending(2, after=1.0),))
WEIGHTS = dict.fromkeys(range(4), 3)


@pytest.mark.parametrize(
    ("blocks", "settings", "seconds"),
    [
        ([KEPT] * 4, {"before": 1.0, "between": 2.0}, 1 + 8 + 2 + 16),
        ([AGAIN] * 2 + [KEPT] * 2, {}, 8 + 2 * 6 + 2 * 4),
        # Each copy takes as long as a forward pass, so that nothing waits.
        ([SMALL] * 4, {}, 8 + 24),
        ([LATE] * 4, {}, 8 + 24),
        # Those to the host are done at 3, 6, 9 and 12. The fourth block waits until the second's has left, at
        # 6, and after it the third's must have, at 9. Back nothing waits.
        ([LARGE] * 4, {}, 9 + 24),
        # Two blocks may still be there: the fourth is done at 8, and the second's has left at 6.
        ([LARGE] * 4, {"resident_blocks": 2}, 8 + 24),
        # Each waits for its own: at once after its forward pass, and before its backward pass.
        ([LARGE] * 4, {"resident_blocks": 0, "prefetched_blocks": 0}, 4 * 3 + 4 * (3 + 6)),
        # Two are in the slots at first. The third's are there at 5, the fourth's at 8, done at 10. Back the
        # second's are copied from 14 to 17, and the first's from 18 to 21: nothing waits.
        ([KEPT] * 4, {"weights": WEIGHTS}, 10 + 16),
        # With one slot each waits for all of its copy, but for the first, and the last when it turns back.
        ([KEPT] * 4, {"weights": WEIGHTS, "num_slots": 1}, 8 + 3 * 3 + 16 + 3 * 3),
        ([KEPT] * 4, {"weights": WEIGHTS, "num_slots": 4}, 8 + 16),
        # The last one's copy begins at 2, with the second block, and is there at 5.
        ([KEPT] * 4, {"weights": {0: 3, 1: 3, 3: 3}}, 8 + 16),
        # The inputs of a block are fetched before its weights, on the same stream: the second's inputs from
        # 16 to 18, its weights to 21; the first's inputs from 22 to 24, its weights to 27.
        ([SMALL] * 4, {"weights": WEIGHTS}, 10 + 24),
    ],
)
def test_a_step_takes_what_its_streams_take(
    blocks: list[BlockTime], settings: dict[str, Any], seconds: float
) -> None:
    assert simulated(blocks, SPEED, **settings) == seconds


def test_where_nothing_runs_beside_anything_every_copy_is_added() -> None:
    one_by_one = replace(SPEED, is_asynchronous=False)
    # Of four blocks, one is on the device at the turn; of the weights, two are each time.
    copies = 4 * 2 + 3 * 2 + 2 * 2 * 3
    assert simulated([SMALL] * 4, one_by_one, weights=WEIGHTS) == 8 + 24 + copies


class CountedCopies(PlainBackend):
    """Plain copies, and how many bytes they moved."""

    num_bytes = 0

    def to_host(self, host: Tensor, tensor: Tensor) -> Copy:
        self.num_bytes += host.nbytes
        return super().to_host(host, tensor)

    def to_device(self, tensor: Tensor, host: Tensor) -> Copy:
        self.num_bytes += host.nbytes
        return super().to_device(tensor, host)


class Block(nn.Module):
    """A frozen layer, whose weight can be streamed, and a scale that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


@pytest.mark.parametrize("places", [range(6), [0, 2, 3, 5]], ids=["all", "four"])
@pytest.mark.parametrize(
    ("num_slots", "resident_blocks", "prefetched_blocks"), [(2, 1, 1), (1, 0, 0), (3, 2, 1)]
)
def test_engine_and_stream_copy_as_much_as_is_said(
    places: list[int], num_slots: int, resident_blocks: int, prefetched_blocks: int
) -> None:
    blocks, copies, x = [Block() for _ in range(6)], CountedCopies(), torch.randn(4, 32)
    policy = BlockPolicy(select="first_k", n=4)
    engine = GradientEngine(0, None, resident_blocks, prefetched_blocks, copies, policy=policy)
    stream = WeightStream(
        [[blocks[place] for place in places]], x.device, num_slots=num_slots, backend=copies
    )

    def step() -> None:
        with gradient_engine(engine):
            run, hidden = block_runner(len(blocks), True, True), x.clone()
            for place, block in enumerate(blocks):
                hidden = run(place, block, hidden)
        hidden.sum().backward()

    step()
    copies.num_bytes = 0
    step()
    quick = BlockTime(forward=0.0, recompute=0.0, backward=0.0)
    seconds = simulated(
        [replace(quick, sent=(Sending(x.nbytes, after=0.0),))] * 4 + [quick] * 2,
        replace(SPEED, is_asynchronous=False),
        weights=dict.fromkeys(places, stream.slot_bytes // num_slots),
        num_slots=num_slots,
        resident_blocks=resident_blocks,
        prefetched_blocks=prefetched_blocks,
    )
    assert copies.num_bytes == seconds > 0
