"""Kernels take what the slower of computing and of moving bytes takes; cards are found by their names."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from diffsynth_lite.core.planning import Kernel
from diffsynth_lite.training.planning.device_speed import GPUS, DeviceSpeed, gpu_here, gpu_named

FP32, BF16 = torch.float32, torch.bfloat16
SPEED = DeviceSpeed(
    product_flops={FP32: 10.0, BF16: 100.0},
    attention_ratio=0.5,
    attention_backward_ratio=0.4,
    memory_bytes=20.0,
    dequantised_bytes=5.0,
    to_host_bytes=1.0,
    to_device_bytes=1.0,
    launch_seconds={"forward": 0.25, "recompute": 0.5, "backward": 0.125},
)
KERNELS = {
    Kernel("product", BF16, 1000, 20): 10.0,
    Kernel("product", FP32, 1000, 20): 100.0,
    Kernel("product", BF16, 10, 20): 1.0,
    Kernel("attention", BF16, 1000, 20): 20.0,
    Kernel("attention backward", BF16, 1000, 20): 25.0,
    Kernel("attention", FP32, 1000, 20): 200.0,
    Kernel("dequantise", BF16, 0, 20): 4.0,
    Kernel("other", FP32, 0, 20): 1.0,
}


@pytest.mark.parametrize(("kernel", "seconds"), KERNELS.items())
def test_a_kernel_takes_as_long_as_the_slower_of_what_it_does(kernel: Kernel, seconds: float) -> None:
    assert SPEED.seconds(Counter({kernel: 3}), "forward") == 3 * seconds


def test_small_kernels_take_as_long_as_it_takes_to_launch_them() -> None:
    kernels = Counter({Kernel("other", FP32, 0, 2): 8})
    for part, seconds in SPEED.launch_seconds.items():
        assert SPEED.seconds(kernels, part) == 8 * seconds
        assert replace(SPEED, is_asynchronous=False).seconds(kernels, part) == 8 * (seconds + 0.1)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_a_card_is_found_by_what_people_and_cuda_call_it(called: str, name: str) -> None:
    assert gpu_named(called).name == name


@pytest.mark.parametrize(("memory_gib", "is_known"), [(15.6, True), (7.6, False)])
def test_a_card_of_this_machine_with_less_memory_than_the_one_of_its_name_is_not_known(
    memory_gib: float, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="NVIDIA GeForce RTX 4060 Ti", total_memory=memory_gib * 1024**3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _place: device)
    assert (gpu_here() is not None) == is_known


def test_every_card_reaches_less_than_its_data_sheet_says_and_has_a_source() -> None:
    for gpu in GPUS:
        speed = gpu.speed()
        assert speed.attention_backward_ratio < speed.attention_ratio < 1
        assert speed.product_flops[FP32] < speed.product_flops[BF16] < gpu.bf16 * 1e12
        assert speed.memory_bytes < gpu.bandwidth * 1e9
        assert speed.to_device_bytes < 4e9 * gpu.lanes * (gpu.pcie - 3) < speed.memory_bytes
        assert gpu.source.startswith("https://")
    assert gpu_named("RTX 4060 Ti").speed().to_host_bytes == gpu_named("RTX 4090").speed().to_host_bytes / 2
