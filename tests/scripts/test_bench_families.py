"""The families' benchmark counts what arithmetic says, and covers every family."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import families
import pytest
import torch
from families import Kept, count_bytes, method_of
from family_inputs import COUNTED, CountedRelease
from family_subject import FamilySubject, family_of
from meters import STRATEGIES, meter_for

from diffsynth_lite.core.gradient import KEEP
from diffsynth_lite.pipelines import family_names, releases_of

META = torch.device("meta")
BF16 = 2
WIDTH = 256  # of the narrow models


def release_of(family: str) -> CountedRelease:
    return next(release for release in COUNTED if release.family == family)


def counted(
    release: CountedRelease, *strategies: str, changes: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Kept]]:
    with family_of(release, {**release.small, **(changes or {})}) as family:
        subject = FamilySubject(family, release, release.small_pixels, META, torch.bfloat16)
        return count_bytes(subject, {strategy: STRATEGIES[strategy] for strategy in strategies})


@pytest.fixture(scope="module")
def ltx() -> tuple[Mapping[str, Kept], str]:
    """What the script counts of a narrow LTX-Video, by strategy, and all that it prints."""
    counts = []

    def count(*arguments: Any) -> dict[str, dict[str, Kept]]:
        counts.append(count_bytes(*arguments))
        return counts[0]

    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(families, "count_bytes", count)
        families.main(["--family", "ltx_video", "--small"])
    ((kept,),) = (counted.values() for counted in counts)
    return kept, printed.getvalue()


def test_every_family_with_releases_is_counted() -> None:
    assert {release.family for release in COUNTED} == {name for name in family_names() if releases_of(name)}


@pytest.mark.parametrize("release", COUNTED, ids=lambda release: release.name)
def test_a_release_has_the_blocks_and_takes_the_inputs_that_its_data_say(release: CountedRelease) -> None:
    with family_of(release, dict.fromkeys(release.depths, 2)) as family:
        subject = FamilySubject(family, release, release.pixels, META, torch.bfloat16)
        assert set(subject.counted) <= set(family.block_lists)
        subject.backward(method_of("none", KEEP, subject, meter_for(META)).loss(subject))
    lora = [weight for name, weight in subject.model.named_parameters() if "lora_A" in name]
    assert lora
    assert all(weight.grad is not None for weight in lora)


def test_an_offloaded_block_keeps_nothing_and_a_recomputed_one_its_input(
    ltx: tuple[Mapping[str, Kept], str],
) -> None:
    kept, _ = ltx
    tokens = 12 * 8 * 6
    hidden = tokens * WIDTH * BF16
    # A block has attention twice, each with a number in fp32 for each of four heads and tokens.
    numbers = 2 * tokens * 4 * 4
    attention = 2 * hidden + numbers
    assert kept["none"].device > 10 * hidden
    assert kept["every block"] == Kept(device=hidden, host=0)
    assert kept["offload every block"] == Kept(device=0, host=hidden)
    assert kept["every block, save attention"] == Kept(device=hidden + attention, host=0)
    assert kept["offload every block, save attention"] == Kept(device=attention, host=hidden)
    # The numbers are too small to be offloaded, at this size.
    assert kept["every block, offload attention"] == Kept(device=hidden + numbers, host=2 * hidden)
    assert kept["offload every block and attention"] == Kept(device=numbers, host=3 * hidden)


def test_the_two_kinds_of_blocks_of_chroma_are_told_apart() -> None:
    changes = {"approximator_layers": 1}
    double, single = counted(release_of("chroma"), "none", "every block", changes=changes).values()
    hidden = (16 * 16 + 512) * WIDTH * BF16
    # Twelve vectors of modulation for each dual-stream block, in a tensor of its own.
    assert double["every block"] == Kept(device=hidden + 12 * WIDTH * BF16, host=0)
    assert single["every block"] == Kept(device=hidden, host=0)
    assert double["none"].device > single["none"].device


def test_a_resnet_block_of_a_unet_keeps_its_input_too() -> None:
    small = replace(release_of("sdxl"), counted=("up_blocks.2.resnets.0",))
    changes = {"layers_per_block": 1, "transformer_layers_per_block": 1}
    (offloaded,) = counted(small, "offload every block", changes=changes).values()
    # 32 x 32 latents at the first level, of 128 channels from below and 64 that skipped the levels.
    assert offloaded == {"offload every block": Kept(device=0, host=32**2 * (128 + 64) * BF16)}


def test_an_expert_of_wan_keeps_what_a_model_of_the_same_width_keeps() -> None:
    of_text = release_of("wan")
    of_pictures = release_of("wan_i2v")
    changes = {"image_dim": None, "added_kv_proj_dim": None}
    assert counted(of_pictures, "none", changes=changes) == counted(of_text, "none")


def test_the_script_prints_a_table_with_a_row_for_each_kind_of_block(
    ltx: tuple[Mapping[str, Kept], str],
) -> None:
    _, printed = ltx
    (row,) = [line for line in printed.splitlines() if line.startswith("| ltx_video")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["LTX-Video 0.9", "transformer_blocks", "576"]
    assert cells[6] == "0.0 (0.3)"
    assert "LTX-Video 0.9: diffusers, scripts/convert_ltx_to_diffusers.py" in printed
