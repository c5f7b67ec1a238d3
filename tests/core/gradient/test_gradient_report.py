"""A switch that had no effect raises, with the cause that applies."""

from typing import Any

import pytest
import torch
from gradient_models import qwen_image_with_lora, training_step
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    GradientReport,
    HostBytesError,
    IneffectiveSwitchError,
    block_runner,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)

NUM_BLOCKS = 3


def report_of_a_step(
    flags: tuple[bool, bool], *, engine: GradientEngine | None = None, covered: int = NUM_BLOCKS
) -> GradientReport:
    """The report of a training step in which the first ``covered`` blocks go through the engine."""
    engine = engine or GradientEngine()
    case = qwen_image_with_lora()
    with gradient_engine(engine):
        checkpointed = block_runner(NUM_BLOCKS, *flags, unused_matmuls=["img_mlp.net.2", "txt_mlp.net.2"])

        def run(index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return checkpointed(index, block, *args, **kwargs) if index < covered else block(*args, **kwargs)

        training_step(case, intercept_blocks(case.model, run))
    return engine.report()


def require(
    report: GradientReport, checkpointing: bool, offload: bool, expected: int = NUM_BLOCKS, **more: Any
) -> None:
    report.require_effect(
        use_gradient_checkpointing=checkpointing,
        use_gradient_checkpointing_offload=offload,
        expected_blocks=expected,
        **more,
    )


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_a_step_in_which_the_switches_worked_passes(flags: tuple[bool, bool]) -> None:
    report = report_of_a_step(flags)
    require(report, *flags)
    assert (report.blocks_run, report.blocks_recomputed) == (NUM_BLOCKS, NUM_BLOCKS)
    assert (report.bytes_offloaded > 0) == flags[1]


def test_switches_that_are_off_need_no_effect() -> None:
    require(GradientReport(), False, False)
    report = report_of_a_step((False, False))
    require(report, False, False)
    assert (report.blocks_run, report.blocks_checkpointed, report.bytes_offloaded) == (NUM_BLOCKS, 0, 0)


@pytest.mark.parametrize(
    ("flags", "covered", "required", "message"),
    [
        ((True, False), 0, (True, False), "^use_gradient_checkpointing: on, but no block was seen"),
        ((False, True), 0, (False, True), "^use_gradient_checkpointing_offload: on, but no block was seen"),
        (
            (True, True),
            0,
            (True, True),
            "^use_gradient_checkpointing and use_gradient_checkpointing_offload: on, but no block was seen",
        ),
        ((True, False), 2, (True, False), "only 2 of 3 block calls were seen"),
        ((False, False), 3, (True, False), "0 of 3 block calls were checkpointed.*switch off"),
    ],
)
def test_a_switch_that_did_not_reach_all_blocks_is_named(
    flags: tuple[bool, bool], covered: int, required: tuple[bool, bool], message: str
) -> None:
    with pytest.raises(IneffectiveSwitchError, match=message):
        require(report_of_a_step(flags, covered=covered), *required)


def test_the_blocks_ran_without_grad() -> None:
    engine = GradientEngine()
    with gradient_engine(engine), torch.no_grad():
        gradient_checkpoint_forward(torch.sin, True, True, torch.ones(1))
    with pytest.raises(IneffectiveSwitchError, match=r"0 of 1 block calls were checkpointed.*torch\.no_grad"):
        require(engine.report(), True, True, expected=1)


def test_gradients_do_not_reach_the_blocks() -> None:
    engine, head = GradientEngine(), torch.ones(1, requires_grad=True)
    with gradient_engine(engine):
        frozen = gradient_checkpoint_forward(torch.sin, True, False, torch.ones(1))
        (frozen * head).sum().backward()
    with pytest.raises(
        IneffectiveSwitchError, match="none of the 1 checkpointed blocks was recomputed: no gradient"
    ):
        require(engine.report(), True, False, expected=1)


def test_a_policy_that_did_not_reach_the_blocks() -> None:
    report = report_of_a_step((True, False))
    require(report, True, False, 3, expected_checkpointed=3)
    with pytest.raises(IneffectiveSwitchError, match=r"3 block calls .* selects 2: .* block_runner"):
        require(report, True, False, 3, expected_checkpointed=2)


@pytest.mark.parametrize(
    ("counts", "message"),
    [({}, "no attention was seen"), ({"attention_not_saved": 4}, "none of 4 attention outputs was saved")],
)
def test_no_attention_was_saved(counts: dict[str, int], message: str) -> None:
    report = GradientReport(blocks_run=2, blocks_checkpointed=2, blocks_recomputed=2, **counts)
    with pytest.raises(IneffectiveSwitchError, match=f"^save_attention: on, but {message}"):
        require(report, True, False, 2, save_attention=True)


def test_offloaded_attention_does_not_prove_that_inputs_are_offloaded() -> None:
    worked = {"blocks_run": 2, "blocks_checkpointed": 2, "blocks_recomputed": 2, "attention_saved": 2}
    report = GradientReport(**worked, tensors_offloaded=4, bytes_offloaded=64, attention_bytes_offloaded=64)
    require(report, True, False, 2, save_attention=True)
    with pytest.raises(IneffectiveSwitchError, match=r"^use_.*_offload: on, but nothing was offloaded"):
        require(report, True, True, expected=2)


def test_a_cap_too_small_for_saved_attention_raises() -> None:
    policy = BlockPolicy(selected=BlockStrategy(save_attention="park"))
    with pytest.raises(HostBytesError, match=r"^host_bytes is 4096, and one block call offloads 7344 bytes"):
        report_of_a_step((True, False), engine=GradientEngine(host_bytes=4096, policy=policy))


def test_the_table_shows_saved_attention() -> None:
    policy = BlockPolicy(selected=BlockStrategy(save_attention="park"))
    lines = report_of_a_step((True, False), engine=GradientEngine(1024, policy=policy)).lines()
    assert "attention       3 outputs saved, 1.3 KiB on device, 20.2 KiB offloaded" in lines


def test_all_tensors_are_below_min_bytes() -> None:
    report = report_of_a_step((True, True), engine=GradientEngine(min_bytes=1 << 20))
    # The hidden states are the largest: batch 2, 20 tokens, 32 channels, fp32.
    message = (
        r"^use_gradient_checkpointing_offload: on, but .* all 21 tensors are below min_bytes "
        r"\(largest was 5120 bytes\)"
    )
    with pytest.raises(IneffectiveSwitchError, match=message):
        require(report, True, True)


def test_everything_was_left_for_several_reasons() -> None:
    engine, weight = GradientEngine(min_bytes=1 << 20), nn.Parameter(torch.ones(256))
    with gradient_engine(engine):
        gradient_checkpoint_forward(torch.mul, True, True, weight, torch.ones(1)).sum().backward()
    message = (
        r"nothing was offloaded: 1 tensors, 1\.0 KiB \(parameter\), 1 tensors, 4 bytes \(below min_bytes\)"
    )
    with pytest.raises(IneffectiveSwitchError, match=message):
        require(engine.report(), True, True, expected=1)


def test_blocks_without_tensors_among_their_inputs_offload_nothing() -> None:
    engine, weight = GradientEngine(), torch.ones(3, requires_grad=True)

    def block(scale: float) -> Tensor:
        return (weight * scale).sin()

    with gradient_engine(engine):
        gradient_checkpoint_forward(block, False, True, 2.0).sum().backward()
    with pytest.raises(IneffectiveSwitchError, match="no tensor among their inputs"):
        require(engine.report(), False, True, expected=1)


def test_the_report_shows_people_what_happened() -> None:
    lines = report_of_a_step((True, True), engine=GradientEngine(1024, 1024**3, resident_blocks=0)).lines()
    assert lines == [
        "blocks          3 run, 3 checkpointed, 3 recomputed",
        "offloaded       7 tensors, 21.5 KiB, 2 fetched late",
        "shared          2 tensors, 2.5 KiB",
        "not offloaded   12 tensors, 3.3 KiB (below min_bytes)",
        "not recomputed  9 matrix products",
        "host memory     32.0 KiB of 1.0 GiB",
    ]


def test_the_report_has_a_number_for_every_field_and_reason() -> None:
    report = report_of_a_step((True, True), engine=GradientEngine(1024, 1024**3))
    metrics = report.metrics()
    assert all(type(value) is int for value in metrics.values())
    assert metrics["tensors_offloaded"] == report.tensors_offloaded > 0
    assert metrics["host_bytes_cap"] == 1024**3
    assert (
        metrics["tensors_not_offloaded_below_min_bytes"]
        == report.not_offloaded["below min_bytes"].num_tensors
        == 12
    )
    assert metrics["bytes_not_offloaded_host_full"] == 0
    assert metrics.keys() == GradientReport().metrics().keys()


def test_a_cap_smaller_than_one_block_raises_in_the_first_forward_and_says_what_a_block_needs() -> None:
    engine = GradientEngine(host_bytes=8192)
    with pytest.raises(HostBytesError, match=r"^host_bytes is 8192, and one block call offloads 9326 bytes"):
        report_of_a_step((True, True), engine=engine)
    assert engine.report().blocks_run == 1
    assert engine.host_pool.num_bytes_lent == 0


def test_a_cap_that_holds_a_block_does_not_stop_a_later_larger_batch() -> None:
    engine, weight = GradientEngine(host_bytes=8192), torch.ones(1024, requires_grad=True)
    with gradient_engine(engine):
        for num_rows in (1, 4):
            x = torch.ones(num_rows, 1024)
            gradient_checkpoint_forward(torch.mul, False, True, x, weight * 1).sum().backward()
    assert torch.equal(weight.grad, torch.full((1024,), 5.0))
    assert engine.report().not_offloaded["host memory full"].num_bytes == 4 * 4096


def test_a_cap_smaller_than_all_blocks_leaves_the_rest_on_the_device() -> None:
    report = report_of_a_step((True, True), engine=GradientEngine(host_bytes=16384))
    require(report, True, True)
    assert report.not_offloaded["host memory full"].num_tensors > 0
    assert report.host_bytes <= 16384


def test_a_new_report_starts_from_zero_and_leaves_the_old_one_alone() -> None:
    engine = GradientEngine(min_bytes=1024)
    old = report_of_a_step((True, True), engine=engine)
    engine.start_report()
    # The pool is what there is, not an event.
    assert engine.report() == GradientReport(host_bytes=old.host_bytes, host_bytes_cap=old.host_bytes_cap)
    assert old.blocks_run == 3
    assert old.not_offloaded
    second = report_of_a_step((True, True), engine=engine)
    engine.start_report()
    assert report_of_a_step((True, True), engine=engine) == second


def test_without_a_scope_calls_do_not_share_an_engine() -> None:
    engine = GradientEngine()
    with gradient_engine(engine):
        pass
    gradient_checkpoint_forward(torch.sin, True, True, torch.ones(1, requires_grad=True)).sum().backward()
    assert engine.report() == GradientReport()


def test_an_inner_engine_takes_over_for_its_scope() -> None:
    outer, inner = GradientEngine(), GradientEngine()
    with gradient_engine(outer):
        with gradient_engine(inner):
            gradient_checkpoint_forward(torch.sin, False, False, torch.ones(1))
        gradient_checkpoint_forward(torch.sin, False, False, torch.ones(1))
    assert (outer.report().blocks_run, inner.report().blocks_run) == (1, 1)
