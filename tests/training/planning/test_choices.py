"""Settings that fit a device, and what memory.auto chooses."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.planning.counts import StepCost
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning import automatic
from diffsynth_lite.training.planning.automatic import ChosenMemory, choose_memory
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
        settings = step_settings(made, None)
        assert replace(settings, accumulates=False) == choice.settings


@pytest.mark.parametrize("override", ["train.compile=blocks", "model.attention=_native_math"])
def test_compiled_blocks_and_kernels_that_are_not_fused_save_no_attention(override: str) -> None:
    config = load_config("qwen_lora.yaml", ["data.path=x", override]).config
    settings = replace(step_settings(config, None), accumulates=False)
    assert settings.skip_dead_ops is (config.train.compile == "off")
    best = choices(ARITHMETIC, ARITHMETIC.seconds, [settings], MemoryBudget(device=60, host=ANY))
    assert best
    assert {choice.settings.policy.selected.save_attention for choice in best} == {"no"}


def test_what_takes_least_of_the_device_streams_all() -> None:
    least = least_of_device(ARITHMETIC, StepSettings())
    assert (least.stream_blocks, least.use_gradient_checkpointing_offload) == ("all", True)


PROCESS = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
GIB = 1024**3


@pytest.fixture(autouse=True)
def by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten blocks; a micro-batch twice as large takes a quarter more, and half of them are needed."""

    def seconds(settings: StepSettings) -> float:
        return ARITHMETIC.seconds(settings) * {1: 1, 2: 0.625, 4: 0.4}[settings.micro_batch_size]

    monkeypatch.setattr(automatic, "counter_of", lambda *_: ARITHMETIC)
    monkeypatch.setattr(automatic, "timer_of", lambda *_: SimpleNamespace(seconds=seconds))


def chosen(
    device: int,
    host: int,
    *settings: str,
    earlier: dict[str, Any] | None = None,
    shards: SimpleNamespace | None = None,
    splits_batches: bool = False,
) -> ChosenMemory:
    room = (f"memory.device_gib={(device + 0.5) / GIB}", f"memory.host_gib={(host + 0.5) / GIB}")
    config = load_config("qwen_lora.yaml", ["data.path=x", "memory.auto=true", *room, *settings]).config
    family = SimpleNamespace(shards=shards, splits_batches=splits_batches)
    return choose_memory(config, family, PROCESS, earlier=earlier)


def described(config: Config) -> str:
    train, memory = config.train, config.memory
    if not train.use_gradient_checkpointing:
        how = "kept"
    else:
        how = "offloaded" if train.use_gradient_checkpointing_offload else "again"
        how = f"{memory.policy_n or 10} {how}, attention {memory.save_attention}"
    return f"{how}, {memory.stream_blocks} streamed, {config.model.quantize}"


def test_what_is_sharded_is_not_streamed() -> None:
    shards = SimpleNamespace(num_shards=2)
    made = chosen(110, 10, "memory.shard_base=all", shards=shards)
    assert described(made.config) == "10 offloaded, attention no, 0 streamed, none"
    with pytest.raises(UserError, match="nothing fits 60 bytes"):
        chosen(60, 99, "memory.shard_base=all", shards=shards)


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (210, 0, "kept, 0 streamed, none"),
        (150, 0, "9 again, attention keep, 0 streamed, none"),
        (140, 0, "10 again, attention keep, 0 streamed, none"),
        (120, 0, "10 again, attention no, 0 streamed, none"),
        (110, 10, "10 offloaded, attention no, 0 streamed, none"),
        (60, 99, "10 offloaded, attention no, 7 streamed, none"),
        (29, 99, "10 offloaded, attention park, 9 streamed, int8"),
    ],
)
def test_each_limit_has_another_setting_chosen_and_the_format_is_the_last(
    device: int, host: int, expected: str
) -> None:
    given = ("memory.policy=every_n", "memory.policy_n=2", "memory.stream_blocks=3")
    made = chosen(device, host, *given, "memory.may_change=[quantize]")
    assert described(made.config) == expected
    assert made.lasting == {"model.quantize": made.config.model.quantize}
    assert made.predicted_bytes is not None
    assert made.predicted_bytes <= device


def test_where_nothing_fits_the_least_is_named_and_what_would_help() -> None:
    with pytest.raises(
        UserError, match=r"nothing fits 60 bytes .* of the host\. Least of the device"
    ) as error:
        chosen(60, 10)
    message = str(error.value)
    assert "train.use_gradient_checkpointing_offload: true" in message
    assert "memory.stream_blocks: all" in message
    assert "What would help: model.quantize: int8, with which it is 20 bytes (a new run); smaller" in message


def test_the_micro_batch_that_takes_least_time_a_sample_is_chosen_where_it_may_be_and_stays() -> None:
    assert chosen(1000, 0).config.train.micro_batch_size == 1
    allowed = "memory.may_change=[micro_batch_size]"
    made = chosen(1000, 0, allowed)
    assert (made.config.train.micro_batch_size, made.config.train.global_batch_size) == (4, 4)
    assert made.lasting == {"train.micro_batch_size": 4}
    assert chosen(140, 0, allowed).config.train.micro_batch_size == 2
    assert chosen(1000, 0, allowed, earlier=made.lasting).config.train.micro_batch_size == 4
    # A run that was started without the choice keeps what it has.
    assert chosen(1000, 0, allowed, earlier={}).config.train.micro_batch_size == 1


def test_a_sharded_model_that_splits_batches_is_given_no_larger_ones_which_would_be_refused() -> None:
    sharded: Any = {"shards": SimpleNamespace(num_shards=2)}
    given = "memory.may_change=[micro_batch_size]", "memory.shard_base=all"
    assert chosen(1000, 0, *given, **sharded).config.train.micro_batch_size == 4
    assert chosen(1000, 0, *given, **sharded, splits_batches=True).config.train.micro_batch_size == 1
