"""Cards are found by their names, and reach less than their data sheets say."""

from types import SimpleNamespace

import pytest
import torch

from diffsynth_lite.core.planning import Work
from diffsynth_lite.training.planning.step_time import GPUS, gpu_here, gpu_named


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
    work = Work(flops=10**12, num_bytes=10**9)
    for gpu in GPUS:
        assert gpu.seconds(work, 4) > gpu.seconds(work, 2) > 1 / gpu.bf16 + 1 / gpu.bandwidth
        assert gpu.bus_bytes < 4e9 * gpu.lanes * (gpu.pcie - 3) < gpu.bandwidth * 1e9
        assert gpu.source.startswith("https://")
    assert gpu_named("RTX 4060 Ti").bus_bytes == gpu_named("RTX 4090").bus_bytes / 2
