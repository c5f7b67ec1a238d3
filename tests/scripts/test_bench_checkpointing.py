"""The checkpointing benchmark tells rows apart as arithmetic says, on real blocks of three models."""

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import checkpointing
import pytest
from checkpointing import PERIOD, parse_arguments, rows
from meters import Figures, measure, meter_for
from subjects import Size, build_subject

BLOCKS = 8
SMALL = {
    "ltx": Size(num_blocks=BLOCKS, num_heads=1, height=256, width=512, num_frames=9),
    "wan": Size(num_blocks=5, num_heads=1, height=128, width=128, num_frames=5),
    "qwen": Size(num_blocks=5, num_heads=1, height=128, width=256, num_frames=1),
}
HIDDEN_BYTES = {
    "ltx": 2 * 8 * 16 * 64 * 4,  # tokens x width x 4 bytes
    "wan": 2 * 8 * 8 * 128 * 4,
    "qwen": (8 * 16 + 512) * 128 * 4,  # picture and text
}
ATTENTION_BYTES = {
    # Output, and a number for each head and token; a block of LTX and Wan has attention twice.
    "ltx": 2 * 256 * (64 + 1) * 4,
    "wan": 2 * 128 * (128 + 1) * 4,
    "qwen": (128 + 512) * (128 + 1) * 4,
}


def figures(
    model: str, *options: str, device: str = "cpu", names: tuple[str, ...], size: Size | None = None
) -> dict[str, Figures]:
    arguments = ["--model", model, "--device", device, "--dtype", "float32", *options]
    subject = build_subject(parse_arguments(arguments), size or SMALL[model])
    meter = meter_for(subject.device)
    methods = [method for method in rows(subject, meter) if method.name in names]
    counts = [subject.num_blocks - PERIOD, subject.num_blocks]
    return measure(subject, methods, meter, counts, num_warmup=0, num_rounds=1)


@pytest.fixture(scope="module")
def script() -> tuple[dict[str, Figures], str]:
    """What the script measures of all rows of a small LTX-Video, and what it prints."""
    measured = {}

    def keep_figures(*arguments: Any, **options: int) -> dict[str, Figures]:
        measured.update(measure(*arguments, **options))
        return measured

    options = "--device cpu --train lora --rank 2 --warmup 0 --rounds 1"
    size = f"--num-blocks {BLOCKS} --heads 1 --height 256 --width 512 --frames 9"
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(checkpointing, "measure", keep_figures)
        checkpointing.main([*options.split(), *size.split()])
    return measured, printed.getvalue()


@pytest.fixture
def ltx(script: tuple[dict[str, Figures], str]) -> dict[str, Figures]:
    return script[0]


def test_every_row_keeps_between_forward_and_backward_what_its_policy_says(ltx: dict[str, Figures]) -> None:
    block = {name: row.block_bytes for name, row in ltx.items()}
    hidden, attention = HIDDEN_BYTES["ltx"], ATTENTION_BYTES["ltx"]
    assert block["none"] > 5 * hidden
    assert block["every block"] == block["every block, dead ops run"] == hidden
    assert block["every 2nd"] == block["first half"] == (block["none"] + hidden) / 2
    assert block["every 4th"] == (3 * block["none"] + hidden) / 4
    assert block["every block, save attention"] == hidden + attention
    assert block["every block, offload attention"] == hidden
    assert block["offload every block"] == block["offload every block and attention"] == 0
    assert block["offload every block, save attention"] == attention
    assert block["offload first half"] == block["none"] / 2


def test_what_is_offloaded_is_in_host_memory_and_nothing_else(ltx: dict[str, Figures]) -> None:
    host = {name: row.most.host for name, row in ltx.items()}
    hidden, attention = HIDDEN_BYTES["ltx"], ATTENTION_BYTES["ltx"]
    assert host["none"] == host["every block"] == host["every block, save attention"] == 0
    assert host["offload every block"] == host["offload every block, save attention"] == BLOCKS * hidden
    assert host["offload first half"] == BLOCKS // 2 * hidden
    assert host["every block, offload attention"] == BLOCKS * attention
    assert host["offload every block and attention"] == BLOCKS * (hidden + attention)


def test_every_row_is_timed_on_a_cpu_and_the_peak_falls_with_what_is_kept(ltx: dict[str, Figures]) -> None:
    assert all(row.seconds for row in ltx.values())
    peak = {name: row.most.peak for name, row in ltx.items()}
    assert peak["none"] > peak["every 4th"] > peak["every 2nd"] >= peak["first half"] > peak["every block"]
    assert peak["every block"] >= peak["offload every block"]


@pytest.mark.parametrize("model", ["wan", "qwen"])
def test_other_models_keep_their_inputs_and_attention_outputs(model: str) -> None:
    names = ("every block", "every block, save attention", "offload every block and attention")
    recompute, save, offload = figures(model, "--train", "lora", names=names).values()
    hidden, attention = HIDDEN_BYTES[model], ATTENTION_BYTES[model]
    assert (recompute.block_bytes, save.block_bytes, offload.block_bytes) == (hidden, hidden + attention, 0)
    assert offload.most.host == SMALL[model].num_blocks * (hidden + attention)


def test_what_is_counted_on_meta_is_what_a_cpu_keeps() -> None:
    # Where attention is offloaded, its small part stays on meta: only a CPU has no least size.
    names = ("none", "offload every block, save attention")
    size = replace(SMALL["ltx"], num_blocks=5)
    on_cpu, on_meta = (figures("ltx", device=device, names=names, size=size) for device in ("cpu", "meta"))
    assert set(on_meta) == set(names)
    for name, row in on_meta.items():
        assert (row.most, row.block_bytes) == (on_cpu[name].most, on_cpu[name].block_bytes), name
        assert row.seconds is None


def test_without_a_frozen_weight_there_is_no_row_of_dead_products() -> None:
    subject = build_subject(parse_arguments(["--device", "cpu"]), SMALL["ltx"])
    assert "every block, dead ops run" not in {row.name for row in rows(subject, meter_for(subject.device))}


def test_the_script_prints_its_rows_as_a_table(script: tuple[dict[str, Figures], str]) -> None:
    figures, printed = script
    assert "num_heads=1, height=256, width=512, num_frames=9" in printed
    header = next(line for line in printed.splitlines() if line.startswith("| recompute"))
    columns = [column.strip() for column in header.strip("|").split("|")]
    assert columns[:5] == ["recompute", "4 blocks", "8 blocks", "a block more", "peak"]
    assert all(f"\n| {name} " in printed for name in figures)


def test_too_few_blocks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--num-blocks", "4"])
    assert "at least 8 are needed" in capsys.readouterr().err
