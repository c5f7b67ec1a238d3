"""Of the settings that fit the fastest come first, and no two of them are the same in effect."""

from dataclasses import dataclass, replace

import pytest

from diffsynth_lite.config import load_config
from diffsynth_lite.core.planning import StepCost
from diffsynth_lite.training.planning.choices import Choice, MemoryBudget, choices, least_of_device
from diffsynth_lite.training.planning.memory_count import MemoryCount
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.subject import step_settings

ANY = 1e9


@dataclass
class Arithmetic:
    """Ten blocks whose weights take 10 each, with activations and a time by what happens to them.

    A block that is kept holds 10, a recomputed one 1, and what attention computed 2 more. A block takes 3
    seconds; to run it again one more, or half of it where attention is saved. A streamed block takes 0.3 and,
    with what else crosses the bus, more.
    """

    num_blocks = 10

    def with_strategy(self, settings: StepSettings) -> int:
        policy = settings.in_effect().policy
        return len(policy.selection(self.num_blocks)) if policy.selected.recompute else 0

    def counted_as(self, settings: StepSettings) -> object:
        return replace(settings.in_effect().policy, select="all", n=None)

    def count(self, settings: StepSettings) -> MemoryCount:
        strategy, treated = settings.in_effect().policy.selected, self.with_strategy(settings)
        saved = {"no": 0, "keep": 2, "park": 0}[strategy.save_attention]
        held = 10 * (self.num_blocks - treated) + treated * (saved + (not strategy.offload))
        host = treated * (strategy.offload + 2 * (strategy.save_attention == "park"))
        streamed = 10 if settings.stream_blocks == "all" else settings.stream_blocks
        size = 10 if settings.quantize == "none" else 5
        return MemoryCount(
            weights=size * (self.num_blocks - streamed),
            slots=2 * size if streamed else 0,
            lora=0,
            optimizer=0,
            gradients=0,
            step=StepCost(kept=held, peak=held * settings.micro_batch_size + 10, host=host),
            weights_on_host=size * streamed,
        )

    def seconds(self, settings: StepSettings) -> float:
        strategy, treated = settings.in_effect().policy.selected, self.with_strategy(settings)
        again = treated * (0.5 if strategy.save_attention != "no" else 1)
        return 30 + again + 0.3 * int(settings.stream_blocks) + 0.01 * self.count(settings).step.host


ARITHMETIC = Arithmetic()


def found(device: float, host: float = ANY, **settings: object) -> list[Choice]:
    kinds = [replace(StepSettings(), **settings)]
    return choices(ARITHMETIC, ARITHMETIC.seconds, kinds, MemoryBudget(device=device, host=host))


def in_words(choice: Choice) -> str:
    settings = choice.settings
    strategy, treated = settings.in_effect().policy.selected, ARITHMETIC.with_strategy(settings)
    attention = {"no": "", "keep": "+attention", "park": "+attention offloaded"}[strategy.save_attention]
    how = f"{treated} {'offloaded' if strategy.offload else 'again'}{attention}" if treated else "kept"
    return f"{how}, {settings.stream_blocks} streamed" if settings.stream_blocks else how


BOTH = "offloaded+attention offloaded"
ALIKE = ["10 again+attention", "10 again+attention offloaded", f"10 {BOTH}"]


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        # All is kept where that fits, and nothing mixed.
        (210, ANY, ["kept", *ALIKE, "10 again", "10 offloaded"]),
        # To stream costs less than to compute again. The eight best, so not all.
        (
            150,
            ANY,
            [
                *("kept, 8 streamed", f"1 {BOTH}, 7 streamed", "1 again+attention, 8 streamed"),
                *(f"6 {BOTH}", "9 again+attention", *ALIKE),
            ],
        ),
        # Without host memory nothing is offloaded, and nothing streamed.
        (150, 0, ["9 again+attention", "10 again+attention", "10 again"]),
        # What takes no less memory, of device or host, and no less time than another is left out.
        (60, ANY, [f"7 {BOTH}, 10 streamed", f"10 {BOTH}, 7 streamed", "10 offloaded, 7 streamed"]),
        (60, 99, ["10 offloaded, 7 streamed"]),
        (29, ANY, []),
    ],
)
def test_the_fastest_that_fits_comes_first_and_nothing_is_given_up_for_nothing(
    device: int, host: float, expected: list[str]
) -> None:
    best = found(device, host)
    assert [in_words(choice) for choice in best] == expected
    assert [choice.seconds for choice in best] == sorted(choice.seconds for choice in best)


def test_processes_share_streamed_weights_and_the_offload_takes_a_part_of_what_they_leave() -> None:
    settings = replace(StepSettings(use_gradient_checkpointing_offload=True), stream_blocks="all")
    count = ARITHMETIC.count(settings)
    assert (count.weights_on_host, count.step.host) == (100, 10)
    room = MemoryBudget(device=ANY, host=45, num_sharing=4, offload_ratio=0.5)
    assert room.fits(count)
    assert not replace(room, host=44).fits(count)


def test_the_settings_that_are_written_give_the_step_that_was_chosen() -> None:
    given = ["memory.policy=every_n", "memory.policy_n=3", "memory.stream_blocks=auto", "data.path=x"]
    config = load_config("qwen_lora.yaml", given).config
    best = [choice for device in (210, 150, 60) for choice in found(device)]
    assert any(choice.settings.policy.select == "first_k" for choice in best)
    for choice in best:
        made = load_config("qwen_lora.yaml", [*given, *choice.overrides(config)]).config
        told = step_settings(made, None)
        assert replace(told, accumulates=False) == choice.settings


def test_compiled_blocks_save_no_attention() -> None:
    config = load_config("qwen_lora.yaml", ["data.path=x", "train.compile=blocks"]).config
    settings = replace(step_settings(config, None), accumulates=False)
    assert settings.skip_dead_ops is False
    best = choices(ARITHMETIC, ARITHMETIC.seconds, [settings], MemoryBudget(device=60, host=ANY))
    assert best
    assert {choice.settings.policy.selected.save_attention for choice in best} == {"no"}


def test_what_takes_least_of_the_device_streams_all() -> None:
    least = least_of_device(ARITHMETIC, StepSettings())
    assert (least.stream_blocks, least.use_gradient_checkpointing_offload) == ("all", True)
