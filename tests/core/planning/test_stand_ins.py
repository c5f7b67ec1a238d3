"""Models without numbers: their callers see the CPU, calls are counted, and nothing is computed."""

import torch
from torch import Tensor, nn

from diffsynth_lite.core.planning import CountingMeter, StandIns

META = torch.device("meta")
KIB = 1024


class Layer(nn.Module):
    """Takes a picture to one of as many channels, and keeps the last in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, 1, 1))
        self.num_runs = 0

    def forward(self, picture_bchw: Tensor, kept: list[Tensor | None]) -> Tensor:
        self.num_runs += 1
        output = nn.functional.conv2d(picture_bchw, self.weight).relu()
        kept[0] = output[:, :, :8].clone()
        return output


class Parts(nn.Module):
    """Runs its layer on halves of a picture, as often as asked for, and returns the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.scale = nn.Buffer(torch.ones(()))

    def forward(self, picture_bchw: Tensor, tokens_bl: Tensor, times: int) -> tuple[Tensor, Tensor]:
        kept: list[Tensor | None] = [None]
        if not tokens_bl.bool().all():
            raise ValueError("a token is hidden")
        rows = [self.layer(half, kept) for half in picture_bchw.chunk(2, dim=2) for _ in range(times)]
        chosen = picture_bchw.flatten(2)[:, :, tokens_bl[0] > 1]
        return torch.cat(rows, dim=2) * self.scale, chosen


def test_a_call_holds_what_that_of_a_real_model_holds_and_repeated_parts_run_once() -> None:
    picture, tokens = torch.ones(1, 4, 16, 16), torch.tensor([[1, 2] * 128])
    real, meter = Parts(), CountingMeter()
    with torch.no_grad(), meter:
        meter.start()
        expected = real(picture.clone(), tokens, 3)
    stand_ins = StandIns()
    with META:
        empty = Parts()
    model = stand_ins.put(empty, "parts", repeated=("layer",))
    with torch.no_grad():
        found = model(picture, tokens, 3)
    assert [(call.model, call.method, call.peak) for call in stand_ins.calls] == [
        ("parts", "forward", meter.peak_bytes)
    ]
    assert (real.layer.num_runs, empty.layer.num_runs) == (6, 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, torch.zeros_like(theirs))


def test_weights_are_zeros_that_take_no_memory_and_stay_where_they_are() -> None:
    with META:
        weight = nn.Linear(KIB, KIB, bias=False)
        tied = nn.Sequential(weight, nn.Linear(KIB, KIB, bias=False))
    tied[1].weight = weight.weight
    model = StandIns().put(tied, "tied")
    (parameter,) = model.parameters()
    assert parameter.nbytes == 4 * KIB**2
    assert parameter.untyped_storage().nbytes() == 4
    assert model.to("cpu") is model
    assert next(model.parameters()) is parameter
