"""The families' benchmark counts what arithmetic says, and covers the families that there are."""

import bench_families
import pytest
import torch
from bench_families import FamilySubject, Kept, count_bytes, family_of, time_row
from bench_meters import TREATMENTS
from bench_releases import RELEASES

from diffsynth_lite.pipelines import family_names

BF16 = 2
WIDTH = 256  # of the narrow models


def counted(name: str, *treatments: str) -> dict[str, dict[str, Kept]]:
    release = RELEASES[name]
    with family_of(name, release, release.small) as family:
        subject = FamilySubject(family, release, release.small_pixels, torch.device("meta"), torch.bfloat16)
        return count_bytes(subject, {treatment: TREATMENTS[treatment] for treatment in treatments})


def test_releases_are_those_of_families_that_there_are() -> None:
    assert set(RELEASES) <= set(family_names())


def test_a_parked_block_keeps_nothing_and_a_recomputed_one_its_input() -> None:
    (kept,) = counted("ltx_video", *TREATMENTS).values()
    tokens = 12 * 8 * 6
    hidden = tokens * WIDTH * BF16
    # A block has attention twice, each with a number in fp32 for each of four heads and tokens.
    numbers = 2 * tokens * 4 * 4
    attention = 2 * hidden + numbers
    assert kept["none"].device > 10 * hidden
    assert kept["every block"] == Kept(device=hidden, host=0)
    assert kept["park every block"] == Kept(device=0, host=hidden)
    assert kept["every block, save attention"] == Kept(device=hidden + attention, host=0)
    assert kept["park every block, save attention"] == Kept(device=attention, host=hidden)
    # The numbers are too small to be parked, at this size.
    assert kept["every block, park attention"] == Kept(device=hidden + numbers, host=2 * hidden)
    assert kept["park every block and attention"] == Kept(device=numbers, host=3 * hidden)


def test_the_two_kinds_of_blocks_of_chroma_are_told_apart() -> None:
    double, single = counted("chroma", "none", "every block").values()
    hidden = (16 * 16 + 512) * WIDTH * BF16
    # Twelve vectors of modulation for each dual-stream block, in a tensor of its own.
    assert double["every block"] == Kept(device=hidden + 12 * WIDTH * BF16, host=0)
    assert single["every block"] == Kept(device=hidden, host=0)
    assert double["none"].device > single["none"].device


def test_steps_are_timed_as_a_ratio_to_the_first_row() -> None:
    row = time_row("chroma", torch.device("cpu"), 1)
    assert (row["family"], row["none"]) == ("chroma", "1.00")
    assert float(row["ms, none"]) > 0
    assert len(row) == 2 + 7


def test_the_script_prints_a_table_and_names_families_without_a_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(bench_families.RELEASES, "wan")
    bench_families.main(["--family", "ltx_video", "--small", "--rounds", "0"])
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("| ltx_video")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["transformer_blocks", "576"]
    assert cells[5] == "0.0 (0.3)"
    assert "ltx_video: LTX-Video 2B; defaults of `LTXVideoTransformer3DModel`." in printed
    assert "No released config yet in bench_releases.py:" in printed
    assert "wan" in printed.splitlines()[-1]
