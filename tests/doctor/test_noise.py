"""The doctor's table of noise levels, against what training draws."""

from collections.abc import Sequence

import pytest
import torch
from messy_data import Workplace, add_images, findings
from release_layouts import BOUNDARY, two_experts

from diffsynth_lite.core.noise.densities import LevelShares
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.doctor.findings import Findings, NoiseFindings
from diffsynth_lite.doctor.tables import noise_table
from diffsynth_lite.training.builder import build_noise_levels
from diffsynth_lite.training.checks import bind_family

DRAWS = torch.arange(20_000, dtype=torch.float64) / 20_000


def tenths_of(levels: torch.Tensor) -> torch.Tensor:
    return torch.histc(levels.double(), bins=10, min=0, max=1) / levels.numel()


def as_tensor(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def rows(found: Findings) -> dict[str, NoiseFindings]:
    return {row.name: row for row in found.noise}


def test_sizes_weigh_as_often_as_they_are_seen_and_each_has_its_shift(workplace: Workplace) -> None:
    wide = add_images(workplace, "wide", 3, (160, 80))
    square = add_images(workplace, "square", 4, (64, 64))
    config = workplace.config(f"data.sources=[{{path: {wide}, repeats: 2}}, {{path: {square}, weight: 0.5}}]")
    found = findings(config)
    assert found.noise_level == "the part of noise in what the model sees"
    table = rows(found)
    assert {name: row.part for name, row in table.items()} == {"all steps": 1, "80x48": 0.75, "64x64": 0.25}
    assert table["all steps"].shift is None
    family = bind_family(config)
    levels = build_noise_levels(config, family)
    drawn = {}
    for name, row in table.items():
        if row.shift is None:
            continue
        shape = family.latents_shape(*map(int, name.split("x")), 1)
        assert row.shift == family.family_shift(shape) != 1
        drawn[name] = levels.sigma(DRAWS, shape)
        torch.testing.assert_close(as_tensor(row.shares.tenths), tenths_of(drawn[name]), rtol=0, atol=1e-4)
        assert row.shares.mean == pytest.approx(drawn[name].double().mean().item(), abs=1e-4)
    mixed = 0.75 * tenths_of(drawn["80x48"]) + 0.25 * tenths_of(drawn["64x64"])
    torch.testing.assert_close(as_tensor(table["all steps"].shares.tenths), mixed, rtol=0, atol=1e-4)


def test_one_shift_for_all_sizes_is_one_row(workplace: Workplace) -> None:
    add_images(workplace, "data", 2, (160, 80))
    add_images(workplace, "data/square", 2, (64, 64))
    (row,) = findings(workplace.config(f"data.path={workplace.root}/data", "objective.shift=none")).noise
    assert row.cells == [row.name, "100", "1", "0.50", "50", *["10"] * 10]


def test_each_of_two_experts_has_its_part_of_the_steps(workplace: Workplace) -> None:
    two_experts().save_pretrained(workplace.root / "experts")
    path = add_images(workplace, "data", 2, (64, 64))
    shift = ("objective.shift=static", "objective.shift_value=5")
    both = (f"data.path={path}", f"model.path={workplace.root}/experts", *shift)
    config = workplace.config(*both, family="wan")
    table = rows(findings(config))
    assert list(table) == ["all steps", "transformer", "transformer_2"]
    # Of u -> 5 u / (1 + 4 u), what is above the boundary.
    high = 1 - BOUNDARY / (5 - 4 * BOUNDARY)
    assert table["transformer"].part == pytest.approx(high, abs=1e-6)
    assert table["transformer_2"].part == pytest.approx(1 - high, abs=1e-6)
    assert [row.shift for row in table.values()] == [5, 5, 5]
    family = bind_family(config)
    levels, shape = build_noise_levels(config, family), family.latents_shape(64, 64, 1)
    steps = [levels.sigma(DRAWS, shape, step_uniform=(step + 0.5) / 100) for step in range(100)]
    of_high = torch.cat([sigma for sigma in steps if sigma.min() >= BOUNDARY])
    expected = {"all steps": torch.cat(steps), "transformer": of_high}
    # As many of the 100 steps as are nearest to the part.
    for name, atol in (("all steps", 0.01), ("transformer", 1e-4)):
        torch.testing.assert_close(
            as_tensor(table[name].shares.tenths), tenths_of(expected[name]), rtol=0, atol=atol
        )
    (row,) = findings(workplace.config(*both, "lora.components=[transformer]", family="wan")).noise
    assert row.shares == table["transformer"].shares


def test_levels_that_leave_an_expert_nothing_stop_the_run(workplace: Workplace) -> None:
    two_experts().save_pretrained(workplace.root / "experts")
    path = add_images(workplace, "data", 1, (64, 64))
    overrides = (f"data.path={path}", f"model.path={workplace.root}/experts", "objective.sigma_max=0.5")
    found = findings(workplace.config(*overrides, family="wan"))
    assert found.noise == []
    (problem,) = found.problems
    assert "0.0 to 0.5 leaves nothing of the noise levels 0.875 to 1.0" in problem


def test_inputs_of_an_edit_do_not_split_a_size(workplace: Workplace) -> None:
    add_images(workplace, "data", 1)
    config = workplace.config(f"data.path={workplace.root}/data")
    family = bind_family(config)
    samples = {
        Bucket(width=64, height=64, inputs=((32, 32),)): 1.0,
        Bucket(width=64, height=64, inputs=((64, 32),)): 2.0,
        Bucket(width=128, height=64): 1.0,
    }
    table = noise_table(build_noise_levels(config, family), family, samples)
    assert [(row.name, row.part) for row in table] == [("all steps", 1), ("64x64", 0.75), ("128x64", 0.25)]


def test_audio_with_levels_of_its_own_has_a_row_of_the_clips_that_have_some(workplace: Workplace) -> None:
    add_images(workplace, "data", 1)
    config = workplace.config(f"data.path={workplace.root}/data")
    family = bind_family(config)
    levels = build_noise_levels(config, family)
    levels.shift = lambda shape: 1.0 if len(shape) > 2 else 1.0 + shape[1]
    samples = {
        Bucket(width=64, height=64): 1.0,
        Bucket(width=64, height=64, num_frames=5): 2.0,
        Bucket(width=128, height=64, num_frames=5): 1.0,
    }

    def audio_shape(num_frames: int) -> tuple[int, ...] | None:
        return None if num_frames == 1 else (8, num_frames)

    *clips, audio = noise_table(levels, family, samples, audio_shape)
    assert clips == noise_table(levels, family, samples)
    assert (audio.name, audio.part, audio.shift) == ("audio", 0.75, 6.0)
    drawn = levels.sigma(DRAWS, (8, 5))
    torch.testing.assert_close(as_tensor(audio.shares.tenths), tenths_of(drawn), rtol=0, atol=1e-4)
    assert audio.shares.mean > clips[0].shares.mean
    samples[Bucket(width=64, height=64, num_frames=9)] = 4.0
    assert noise_table(levels, family, samples, audio_shape)[-1].shift is None


def test_numbers_are_rounded_for_reading() -> None:
    shares = LevelShares(tenths=[0.125, 0.004, *[0.0] * 7, 0.871], mean=0.8449)
    row = NoiseFindings(name="all steps", part=1.0, shift=7.7679, shares=shares)
    assert row.cells == [row.name, "100", "7.77", "0.84", "13", "12", "0", *["0"] * 7, "87"]
    assert len(row.cells) == len(NoiseFindings.COLUMNS)
