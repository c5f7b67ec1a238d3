"""The benchmark shows what goes to the host, and that torch's save_on_cpu sees positions and no keywords."""

import offload
import pytest
import torch
from meters import Figures
from offload import covered_ratio, measured, parse_arguments
from subjects import Size, build_subject

SIZE = Size(num_blocks=6, num_heads=1, height=64, width=64, num_frames=9)
HIDDEN_BYTES = 2 * 2 * 2 * 64 * 4  # tokens x width x 4 bytes


@pytest.fixture(scope="module")
def rows() -> dict[str, Figures]:
    subject = build_subject(parse_arguments(["--device", "cpu"]), SIZE)
    return measured(subject, [2, 4, 6], num_warmup=0, num_rounds=1)


def test_the_inputs_on_the_device_do_not_grow_with_the_blocks_when_they_are_offloaded(
    rows: dict[str, Figures],
) -> None:
    device = {name: [row.memory[count].after_forward for count in (2, 4, 6)] for name, row in rows.items()}
    host = {name: [row.memory[count].host for count in (2, 4, 6)] for name, row in rows.items()}
    growth = [4 * HIDDEN_BYTES - 2 * HIDDEN_BYTES] * 2
    assert [
        more - less for less, more in zip(device["checkpoint"], device["checkpoint"][1:], strict=False)
    ] == growth
    assert len(set(device["offload"])) == 1
    assert host["offload"] == [2 * HIDDEN_BYTES, 4 * HIDDEN_BYTES, 6 * HIDDEN_BYTES]
    assert host["checkpoint"] == [0, 0, 0]


def test_save_on_cpu_copies_no_keyword_and_shared_positions_once_a_block(rows: dict[str, Figures]) -> None:
    keywords, positions = (rows[f"save_on_cpu, {how}"].memory for how in ("keywords", "positions"))
    assert [keywords[count].host for count in (2, 6)] == [0, 0]
    assert keywords[6].after_forward == rows["checkpoint"].memory[6].after_forward
    # Hidden states, text, modulation and mask: the last three are the same for every block.
    text, modulation, mask = 128 * 64 * 4, 6 * 64 * 4, 128 * 4
    assert positions[6].host == 6 * (HIDDEN_BYTES + text + modulation + mask)
    assert positions[6].after_forward == positions[2].after_forward


def test_the_script_prints_its_rows_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    offload.main(
        ["--device", "meta", "--num-blocks", "2", "1", "--heads", "1", "--height", "64", "--frames", "9"]
    )
    printed = capsys.readouterr().out
    assert "1 blocks | 2 blocks | a block more" in printed
    assert "| save_on_cpu, positions" in printed
    assert "ms a step" not in printed


def test_one_number_of_blocks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--num-blocks", "4", "4"])
    assert "two different numbers are needed" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_kernels() -> None:
    options = parse_arguments(["--device", "cuda"])
    subject = build_subject(options, Size(num_blocks=8, num_heads=32, height=512, width=768, num_frames=81))
    rows = measured(subject, [4, 8], num_warmup=2, num_rounds=1)
    torch.cuda.empty_cache()
    assert rows["offload"].overlap is not None
    assert rows["offload"].overlap > 0.5
    assert rows["checkpoint"].overlap is None
    hidden = 11 * 16 * 24 * 2048 * 2
    growth = rows["offload"].memory[8].after_forward - rows["offload"].memory[4].after_forward
    assert growth < hidden


@pytest.mark.parametrize(
    ("spans", "covers", "ratio"),
    [
        ([(0, 10)], [(0, 10)], 1),
        ([(0, 10)], [], 0),
        ([(0, 10), (20, 30)], [(5, 25)], 0.5),
        ([(0, 10)], [(2, 4), (3, 6), (3, 5), (8, 20)], 0.6),
        ([(2, 4), (2, 6)], [(5, 9), (0, 3)], 0.5),
        ([], [(0, 1)], None),
    ],
)
def test_the_covered_ratio_is_the_share_of_the_spans_that_lies_in_covers(
    spans: list[tuple[float, float]], covers: list[tuple[float, float]], ratio: float | None
) -> None:
    assert covered_ratio(spans, covers) == ratio
