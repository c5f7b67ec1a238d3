"""Each limit has a run choose other settings, as light as they may be, and what must not change is kept."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_choices import ARITHMETIC

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning import automatic
from diffsynth_lite.training.planning.automatic import ChosenMemory, choose_memory
from diffsynth_lite.training.planning.step import StepSettings

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


def in_words(config: Config) -> str:
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
    assert in_words(made.config) == "10 offloaded, attention no, 0 streamed, none"
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
    assert in_words(made.config) == expected
    assert made.lasting == {"model.quantize": made.config.model.quantize}
    assert made.predicted is not None
    assert made.predicted.device <= device


def test_where_nothing_fits_the_least_is_named_and_what_would_help() -> None:
    with pytest.raises(
        UserError, match=r"nothing fits 60 bytes .* of the host\. Least of the device"
    ) as error:
        chosen(60, 10)
    told = str(error.value)
    assert "train.use_gradient_checkpointing_offload: true" in told
    assert "memory.stream_blocks: all" in told
    assert "What would help: model.quantize: int8, with which it is 20 bytes (a new run); smaller" in told


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
