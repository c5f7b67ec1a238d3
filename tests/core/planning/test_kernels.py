"""What kernels and autocast of a GPU hold on meta, and models without numbers in place of real ones."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from diffsynth_lite.core.planning.kernels import (
    IN_FLOAT32,
    IN_LOWER_PRECISION,
    ON_CUDA,
    TO_FLOAT32,
    CudaAutocast,
    FusedKernels,
)
from diffsynth_lite.core.planning.meters import CountingMeter
from diffsynth_lite.core.planning.stand_ins import StandIns
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def listed(macro: str) -> set[str]:
    """What torch's header lists under a macro."""
    text = HEADER.read_text().partition(f"#define {macro}(_)")[2].partition("\n\n")[0]
    return set(re.findall(r"_\((\w+)", text))


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without its headers")
def test_the_lists_are_those_of_the_installed_torch() -> None:
    lower, upper = listed("AT_FORALL_LOWER_PRECISION_FP"), listed("AT_FORALL_FP32")
    assert lower >= IN_LOWER_PRECISION
    assert upper | {"interpolate"} >= IN_FLOAT32
    assert {"linear", "matmul", "conv2d"} <= IN_LOWER_PRECISION
    no_names_of_their_own = ("_", "upsample", "gru", "lstm", "rnn")
    losses = ("loss", "loss2d", "logits", "div", "_norm")
    left_out = {
        name
        for name in (lower | upper) - IN_LOWER_PRECISION - IN_FLOAT32
        if not name.startswith(no_names_of_their_own) and not name.endswith(losses)
    }
    assert not left_out
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") >= TO_FLOAT32


def test_products_are_in_bf16_and_norms_sums_and_powers_in_float32() -> None:
    x, full = meta(4, 4), meta(4, 4, dtype=FP32)
    with CudaAutocast():
        products = [
            full @ x,
            torch.mm(full, x),
            functional.linear(full, full),
            torch.einsum("ij,jk->ik", full, x),
        ]
        norms = [functional.layer_norm(x, (4,)), functional.rms_norm(x, (4,))]
        others = [*norms, x.sum(), x.softmax(-1), x**2, torch.rsqrt(x)]
        assert {one.dtype for one in products} == {BF16}
        assert {one.dtype for one in others} == {FP32}
        assert (x * x).dtype == functional.silu(x).dtype == x.mean().dtype == BF16
        assert x.sum(dtype=BF16).dtype == BF16


def test_a_part_of_a_model_that_switches_autocast_off_is_not_cast_and_other_devices_are_as_ever() -> None:
    full, before = meta(4, 4, dtype=FP32), torch.autocast
    with FusedKernels(ON_CUDA), CudaAutocast():
        with torch.autocast(device_type="meta", enabled=False):
            assert torch.mm(full, full).dtype == FP32
        assert torch.mm(full, full).dtype == BF16
        with torch.autocast("cpu", BF16):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == BF16
        with pytest.raises(RuntimeError):
            torch.autocast("meta")  # as without the scope
    assert torch.autocast is before


def test_a_trained_weight_is_cast_once_in_a_forward_pass_and_let_go_with_it() -> None:
    weight, autocast, meter = nn.Parameter(meta(256, 256, dtype=FP32)), CudaAutocast(), CountingMeter()
    x, released = meta(256), []
    with meter, autocast.on_cast_released(released.append):
        meter.start()
        with autocast.forward():
            for _ in range(2):
                functional.linear(x, weight).detach()
            assert meter.num_bytes == weight.numel() * BF16.itemsize
        assert released == [weight]
        assert meter.num_bytes == 0


def test_a_frozen_layer_in_a_format_gets_its_input_in_bf16() -> None:
    layer = FrozenLinear(nn.Linear(8, 8, dtype=BF16, device="meta"), Int8(), torch.device("meta"))
    with CudaAutocast():
        assert layer(meta(8, dtype=FP32)).dtype == BF16
    assert layer(meta(8, dtype=FP32)).dtype == FP32


def test_a_norm_keeps_its_input_and_a_number_for_each_row_as_the_kernel_of_a_gpu_does() -> None:
    x, norm, meter = (
        meta(64, 256, dtype=FP32).requires_grad_(),
        nn.RMSNorm(256, device="meta"),
        CountingMeter(),
    )
    with meter, FusedKernels(ON_CUDA):
        meter.start()
        output = norm.requires_grad_(False)(x)
        assert meter.num_bytes == output.nbytes + 64 * FP32.itemsize


def test_masks_without_values_hold_for_all() -> None:
    tokens, mask = meta(5, 8), meta(5, dtype=torch.bool)
    known = torch.arange(5) > 2
    with FusedKernels(ON_CUDA):
        assert bool(torch.all(mask))
        taken, left = tokens[mask], tokens[~mask]
        assert (taken.shape, left.shape, tokens[~~mask].shape) == ((5, 8), (0, 8), (5, 8))
        assert taken is not tokens
        # Those that have values are asked.
        assert torch.arange(5)[known].tolist() == [3, 4]
        assert torch.arange(5)[~known].tolist() == [0, 1, 2]
        assert not bool(torch.all(known))


META = torch.device("meta")
KIB = 1024


class Layer(nn.Module):
    """Takes an image to one of as many channels, and keeps the last in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, 1, 1))
        self.num_runs = 0

    def forward(self, image_bchw: Tensor, kept: list[Tensor | None]) -> Tensor:
        self.num_runs += 1
        output = nn.functional.conv2d(image_bchw, self.weight).relu()
        kept[0] = output[:, :, :8].clone()
        return output


class Parts(nn.Module):
    """Runs its layer on halves of an image, as often as asked for, and returns the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.scale = nn.Buffer(torch.ones(()))

    def forward(self, image_bchw: Tensor, tokens_bl: Tensor, times: int) -> tuple[Tensor, Tensor]:
        kept: list[Tensor | None] = [None]
        if not tokens_bl.bool().all():
            raise ValueError("a token is hidden")
        rows = [self.layer(half, kept) for half in image_bchw.chunk(2, dim=2) for _ in range(times)]
        chosen = image_bchw.flatten(2)[:, :, tokens_bl[0] > 1]
        return torch.cat(rows, dim=2) * self.scale, chosen


def test_a_call_holds_what_that_of_a_real_model_holds_and_repeated_parts_run_once() -> None:
    image, tokens = torch.ones(1, 4, 16, 16), torch.tensor([[1, 2] * 128])
    real, meter = Parts(), CountingMeter()
    with torch.no_grad(), meter:
        meter.start()
        expected = real(image.clone(), tokens, 3)
    stand_ins = StandIns()
    with META:
        empty = Parts()
    model = stand_ins.put(empty, repeated=("layer",))
    with torch.no_grad():
        found = model(image, tokens, 3)
    assert stand_ins.peaks == [("forward", meter.peak_bytes)]
    assert (real.layer.num_runs, empty.layer.num_runs) == (6, 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, torch.zeros_like(theirs))


def test_weights_are_zeros_that_take_no_memory_and_stay_where_they_are() -> None:
    with META:
        weight = nn.Linear(KIB, KIB, bias=False)
        tied = nn.Sequential(weight, nn.Linear(KIB, KIB, bias=False))
    tied[1].weight = weight.weight
    model = StandIns().put(tied)
    (parameter,) = model.parameters()
    assert parameter.nbytes == 4 * KIB**2
    assert parameter.untyped_storage().nbytes() == 4
    assert model.to("cpu") is model
    assert next(model.parameters()) is parameter
