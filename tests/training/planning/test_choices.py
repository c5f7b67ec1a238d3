"""Of the settings that fit, those come first that stream least, then those that compute least again."""

from dataclasses import dataclass

import pytest

from diffsynth_lite.config import load_config
from diffsynth_lite.core.planning import StepBytes
from diffsynth_lite.training.planning.choices import Choice, choices
from diffsynth_lite.training.planning.memory_count import MemoryCount, StepSettings


@dataclass
class Arithmetic:
    """Ten blocks whose weights take 10 each, with activations by what happens to them."""

    num_blocks = 10

    def count(self, settings: StepSettings) -> MemoryCount:
        strategy = settings.policy.selected
        kept = {"no": 10, "keep": 30, "park": 10}[strategy.save_attention] if strategy.recompute else 100
        host = 10 * (strategy.offload + (strategy.save_attention == "park"))
        streamed = int(settings.stream_blocks)
        return MemoryCount(
            weights=10 * (self.num_blocks - streamed),
            slots=20 if streamed else 0,
            lora=0,
            optimizer=0,
            gradients=0,
            step=StepBytes(kept=kept, peak=kept - 5 * strategy.offload, host=host),
            weights_on_host=10 * streamed,
        )


def names_of(found: list[Choice]) -> list[tuple[bool, bool, str, int]]:
    settings = [choice.settings for choice in found]
    return [
        (
            one.use_gradient_checkpointing,
            one.use_gradient_checkpointing_offload,
            one.policy.selected.save_attention,
            int(one.stream_blocks),
        )
        for one in settings
    ]


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (
            200,
            1000,
            [
                (False, False, "no", 0),
                (True, False, "keep", 0),
                (True, False, "park", 0),
                (True, True, "park", 0),
                (True, False, "no", 0),
                (True, True, "no", 0),
            ],
        ),
        # What is kept needs more than all streamed weights leave.
        (
            80,
            1000,
            [
                (True, False, "park", 5),
                (True, True, "park", 5),
                (True, False, "no", 5),
                (True, True, "no", 5),
                (True, False, "keep", 7),
            ],
        ),
        (80, 55, [(True, False, "no", 5)]),
        (20, 1000, []),
    ],
)
def test_as_few_blocks_as_fit_are_streamed_and_the_least_work_comes_first(
    device: int, host: int, expected: list[tuple[bool, bool, str, int]]
) -> None:
    found = choices(Arithmetic(), StepSettings(), device_bytes=device, host_bytes=host)
    assert names_of(found) == expected


def test_the_settings_that_are_written_make_a_config_of_them() -> None:
    given = ["memory.policy=first_k", "memory.policy_n=1", "train.use_gradient_checkpointing_offload=true"]
    config = load_config("qwen_lora.yaml", given).config
    for choice in choices(Arithmetic(), StepSettings(), device_bytes=80, host_bytes=1000):
        made = load_config("qwen_lora.yaml", [*given, *choice.overrides(config)]).config
        train, memory, wanted = made.train, made.memory, choice.settings
        assert (memory.policy, memory.policy_n) == ("all", None)
        assert memory.save_attention == wanted.policy.selected.save_attention
        assert memory.stream_blocks == wanted.stream_blocks
        assert train.use_gradient_checkpointing == wanted.use_gradient_checkpointing
        assert train.use_gradient_checkpointing_offload == wanted.use_gradient_checkpointing_offload
