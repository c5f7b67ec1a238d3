"""Every benchmark starts, and with --all runs at its least size and measures what arithmetic says."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import checkpointing
import families
import methods
import peers
import pytest
import torch
from families import META, counted_families, subject_of
from meters import STRATEGIES, mebibytes, meter_for
from torch import Tensor, nn

from diffsynth_lite.core.gradient import KEEP
from diffsynth_lite.pipelines import releases_of

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
PROGRAMS = [path.stem for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]
BF16 = 2
LTX = ("--heads", "1", "--height", "256", "--width", "512", "--frames", "9")
HIDDEN = 2 * 8 * 16 * 64 * 4
"""Bytes of a block's input: tokens x width x 4 bytes."""
ATTENTION = 2 * 256 * (64 + 1) * 4
"""Of what attention gives: it is called twice, and keeps a number for each head and token."""

Print = Callable[..., list[list[str]]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Print:
    """Runs a benchmark; gives the cells of all rows that it prints."""

    def run(program: str, *arguments: str) -> list[list[str]]:
        monkeypatch.setattr("sys.argv", [program, *arguments])
        import_module(program).main()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    return run


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_says_what_it_is_for(program: str, printed: Print, capsys) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        printed(program, "--help")
    assert "usage:" in capsys.readouterr().out


def test_a_number_of_blocks_that_shows_nothing_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        checkpointing.parse_arguments(["--num-blocks", "4"])
    assert "at least 8 are needed" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_by_policy_keep_what_arithmetic_says(device: str) -> None:
    options = ("--device", device, "--dtype", "float32", "--train", "lora", "--num-blocks", "8")
    subject = checkpointing.Subject(checkpointing.parse_arguments([*options, *LTX]))
    figures = checkpointing.measured(subject, [4, 8], num_warmup=0, num_rounds=1)
    block = {name: row.block_bytes for name, row in figures.items()}
    host = {name: row.most.host for name, row in figures.items()}
    peak = {name: row.most.peak for name, row in figures.items()}
    assert block["none"] > 5 * HIDDEN
    assert block["every block"] == block["every block, dead ops run"] == HIDDEN
    assert block["every 2nd"] == block["first half"] == (block["none"] + HIDDEN) / 2
    assert block["every 4th"] == (3 * block["none"] + HIDDEN) / 4
    assert block["every block, save attention"] == HIDDEN + ATTENTION
    assert block["offload every block, save attention"] == ATTENTION
    assert block["offload first half"] == block["none"] / 2
    assert host["none"] == host["every block"] == host["every block, save attention"] == 0
    assert host["offload every block"] == host["offload every block, save attention"] == 8 * HIDDEN
    assert host["offload first half"] == 4 * HIDDEN
    if device == "cpu":  # on meta there is a least size for what is offloaded, and no time
        assert block["every block, offload attention"] == HIDDEN
        assert block["offload every block"] == block["offload every block and attention"] == 0
        assert host["every block, offload attention"] == 8 * ATTENTION
        assert host["offload every block and attention"] == 8 * (HIDDEN + ATTENTION)
    assert all(bool(row.seconds) == (device == "cpu") for row in figures.values())
    assert peak["none"] > peak["every 4th"] > peak["every 2nd"] >= peak["first half"] > peak["every block"]


@pytest.mark.nightly
def test_save_on_cpu_copies_no_keyword_and_shared_positions_once_a_block() -> None:
    options = ("--device", "cpu", "--heads", "1", "--height", "64", "--width", "64", "--frames", "9")
    subject = checkpointing.Subject(checkpointing.parse_arguments(options))
    rows = {
        name: figures.memory
        for name, figures in checkpointing.measured(subject, [4, 5, 6], num_warmup=0, num_rounds=1).items()
    }
    hidden = 2 * 2 * 2 * 64 * 4
    offloaded, recomputed = rows["offload every block"], rows["every block"]
    assert [offloaded[count].host for count in (4, 5, 6)] == [4 * hidden, 5 * hidden, 6 * hidden]
    assert len({memory.after_forward for memory in offloaded.values()}) == 1
    assert recomputed[6].after_forward - recomputed[4].after_forward == 2 * hidden
    keywords, positions = (rows[f"save_on_cpu, {how}"] for how in ("keywords", "positions"))
    assert {memory.host for memory in (*keywords.values(), *recomputed.values())} == {0}
    # Hidden states, text, modulation and mask: the last three are the same for every block.
    text, modulation, mask = 128 * 64 * 4, 6 * 64 * 4, 128 * 4
    assert positions[6].host == 6 * (hidden + text + modulation + mask)
    assert positions[6].after_forward == positions[4].after_forward


@pytest.mark.gpu
def test_on_a_gpu_copies_run_at_the_same_time_as_kernels() -> None:
    subject = checkpointing.Subject(checkpointing.parse_arguments(["--device", "cuda", "--num-blocks", "8"]))
    rows = checkpointing.measured(subject, [4, 8], num_warmup=2, num_rounds=1)
    torch.cuda.empty_cache()
    offloaded = rows["offload every block"]
    assert offloaded.overlap is not None
    assert offloaded.overlap > 0.5
    assert rows["every block"].overlap is None
    growth = offloaded.memory[8].after_forward - offloaded.memory[4].after_forward
    assert growth < 11 * 16 * 24 * 2048 * 2


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
def test_the_covered_ratio_is_the_share_of_the_spans_that_lies_in_covers(spans, covers, ratio) -> None:
    assert checkpointing.covered_ratio(spans, covers) == ratio


@pytest.mark.nightly
def test_families_print_a_row_for_each_kind_of_block(printed: Print) -> None:
    heading, _, row = printed("families", "--family", "ltx_video")
    assert row[1:4] == ["LTX-Video 0.9", "transformer_blocks", "7,392"]
    hidden = 21 * 16 * 22 * 2048 * BF16
    cells = dict(zip(heading, row, strict=True))
    assert cells["every"] == mebibytes(hidden)
    assert cells["offload"] == f"0.0 ({mebibytes(hidden)})"


@pytest.mark.nightly
@pytest.mark.parametrize("family", counted_families())
def test_a_release_has_blocks_all_of_whose_adapters_learn(family: str) -> None:
    with subject_of(family, releases_of(family)[0]) as subject:
        assert subject.kinds
        subject.backward(families.method_of("none", KEEP, subject, meter_for(META)).loss(subject))
    lora = [weight for name, weight in subject.model.named_parameters() if "lora_A" in name]
    assert lora
    assert all(weight.grad is not None for weight in lora)


@pytest.mark.nightly
def test_a_resnet_block_of_a_unet_keeps_its_input_too() -> None:
    name = "offload every block"
    with subject_of("sdxl", releases_of("sdxl")[0]) as subject:
        (counts,) = families.count_bytes(
            subject, ["up_blocks.2.resnets.0"], {name: STRATEGIES[name]}
        ).values()
    # 128 x 128 latents at the first level, of 640 channels from below and 320 that skipped the levels.
    assert counts == {name: (0, 128**2 * (640 + 320) * BF16)}


@pytest.mark.nightly
def test_loops_of_others_learn_the_same_and_are_timed(tmp_path: Path, printed: Print, capsys) -> None:
    peers.compare(peers.parse_arguments(["--quick", "--modes", "plain"]), tmp_path)
    numbers, times = capsys.readouterr().out.split("CPU time of a step")
    names = (peers.TRAINER, peers.BASE, peers.IN_MEMORY, peers.DIFFUSERS, peers.DIFFUSERS + peers.FUSED)
    for name in names:
        assert re.search(rf"^\| {re.escape(name)} .*0e\+00, 0e\+00", numbers, re.M)
    assert times.count("[") >= len(names) - 1  # the bare loop is what the others are over


def test_a_loop_that_does_other_work_is_not_timed() -> None:
    class Linear:
        def __init__(self, scale: float) -> None:
            self.model = nn.Linear(2, 1)
            self._scale = scale

        def loss(self, _batch: object, sigma: Tensor) -> Tensor:
            return self._scale * self.model(sigma.expand(1, 2)).square().sum()

    batch = SimpleNamespace(uniform=torch.tensor([0.5]))
    with pytest.raises(SystemExit, match="trainer: loss and gradients are"):
        peers.differences_of({peers.TRAINER: Linear(1.01), peers.BASE: Linear(1.0)}, batch)
    off = peers.differences_of({peers.DIFFSYNTH: Linear(1.01), peers.BASE: Linear(1.0)}, batch)
    assert off[peers.DIFFSYNTH] == pytest.approx((0.01, 0.01), rel=1e-3)
    assert peers.ratio_of([2.0, 4.0, 9.0], [2.0, 2.0, 3.0]) == "2.000 [1.000, 3.000]"


@pytest.mark.nightly
def test_ways_to_learn_are_trained_and_measured(monkeypatch: pytest.MonkeyPatch, printed: Print) -> None:
    monkeypatch.setattr(methods.comparison, "NUM_STEPS", 2)
    for name in ("NEW", "KNOWN"):
        monkeypatch.setattr(methods, name, getattr(methods, name)[:2])
    rows = printed("methods", "--method", "schedule-free", "--steps", "1", "--seeds", "0", "--preserve")
    assert [row[0] for row in rows[2:]] == ["before training", "schedule-free, 0.016"]
    column = rows[0].index("moved")
    assert rows[2][column] == "0"
    assert int(rows[3][column]) > 0
