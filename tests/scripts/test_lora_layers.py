"""The benchmark of LoRA layers: both kinds compute the same, and ours keep less."""

from dataclasses import replace

import torch
from family_inputs import COUNTED
from lora_layers import memory_row, time_row

SANA = next(release for release in COUNTED if release.family == "sana")


def test_ours_hold_less_than_those_of_peft_and_compute_the_same() -> None:
    assert float(memory_row(SANA, "every block")["ratio of peaks"]) < 1
    small = replace(SANA, small_pixels=(128, 128, 1))
    assert time_row(small, torch.float32, autocast=True, num_rounds=1)["bits"] == "the same"
