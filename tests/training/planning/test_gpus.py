"""Cards are found by what people and CUDA call them, and none is taken for another one."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffsynth_lite.core.planning.meters import Work
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning.gpus import GPUS, gpu_named
from diffsynth_lite.training.planning.step_time import gpu_here

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4070ti super", "RTX 4070 Ti SUPER"),
        ("RTX 4070", "RTX 4070"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop"),
        ("3070 mobile", "RTX 3070 Laptop"),
        ("3060 12GB", "RTX 3060 12GB"),
        ("4090 24G", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("Apple M3 Max 64 GB", "M3 Max 64GB"),
    ],
)
def test_a_card_is_found_by_what_people_and_cuda_call_it(
    called: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert gpu_named(called).name == name
    assert not caplog.messages


@pytest.mark.parametrize(
    ("called", "name", "others"),
    [("A100", "A100 40GB", "'A100 80GB'"), ("m2 max", "M2 Max 32GB", "'M2 Max 64GB' or 'M2 Max 96GB'")],
)
def test_of_a_name_with_several_memories_the_smallest_is_taken_and_the_others_are_named(
    called: str, name: str, others: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert gpu_named(called).name == name
    assert caplog.messages[0].endswith(f" GB; if yours has more, it is {others}")


@pytest.mark.parametrize(
    ("called", "hint", "gib"),
    [
        ("RTX 4900", "did you mean 'RTX 4090' or 'RTX 4080'? docs", 24),
        ("4090 48GB", "did you mean 'RTX 4090'? docs", 48),
        ("3080 Max-Q", "did you mean 'RTX 3080'", 10),
        ("Tesla M4", "not known; docs", 8),
        ("RTX 6800", "did you mean 'RX 6800'", 16),
        ("A10G", "did you mean 'A10' or", 24),
        ("", "not known; docs", 8),
    ],
)
def test_a_card_that_is_not_known_has_near_names_and_a_way_without_one(
    called: str, hint: str, gib: int
) -> None:
    with pytest.raises(UserError, match=rf"--gpu {called}: .*{re.escape(hint)}.* --device-gib {gib}$"):
        gpu_named(called)


@pytest.mark.parametrize(
    ("called", "memory_gib", "name", "training_gib"),
    [
        ("RTX 4060 Ti", 15.6, "RTX 4060 Ti 16GB", 14.4),
        ("RTX 4060 Ti", 7.6, "RTX 4060 Ti 8GB", 7.2),
        ("RTX 4090 D", 23.6, "NVIDIA GeForce RTX 4090 D", 21.6),  # not in the table
    ],
)
def test_the_card_of_this_machine_is_the_one_with_its_memory(
    called: str, memory_gib: float, name: str, training_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name=f"NVIDIA GeForce {called}", total_memory=memory_gib * 1024**3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _place: device)
    gpu = gpu_here()
    assert gpu
    assert (gpu.name, gpu.training_gib) == (name, pytest.approx(training_gib))


def test_every_card_has_a_source_and_is_timed_below_its_data_sheet_or_it_says_why_not() -> None:
    work = Work(flops=10**12, num_bytes=10**9)
    for gpu in GPUS:
        assert gpu.source.startswith("https://")
        assert gpu_named(gpu.name) is gpu
        assert gpu.is_timed != ("no time is estimated" in gpu.remark)
        if gpu.is_timed:
            assert gpu.seconds(work, 4) > gpu.seconds(work, 2) > 1 / gpu.bf16 + 1 / gpu.bandwidth
            assert gpu.bus_bytes < 4e9 * gpu.lanes * (gpu.pcie - 3) < gpu.bandwidth * 1e9
    assert gpu_named("RTX 4060").bus_bytes == gpu_named("RTX 4090").bus_bytes / 2


def test_the_page_lists_every_card() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    names = {re.sub(r" \d+GB", "", gpu.name).removeprefix("RTX ").removeprefix("RX ") for gpu in GPUS}
    assert [name for name in names if not re.search(rf"[ ,]{re.escape(name)}[,.; ]", text)] == []
