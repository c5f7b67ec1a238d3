"""Which settings make a run the run that it is."""

import dataclasses

import pytest

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data import EncodedItem
from diffsynth_lite.training.contract import (
    DifferentRunError,
    data_contract,
    require_same,
    settings_contract,
)


def config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", overrides).config


def contract(*overrides: str) -> dict:
    return settings_contract(config(*overrides), model_fingerprint="weights")


@pytest.mark.parametrize(
    "override",
    [
        *("train.micro_batch_size=4", "train.use_gradient_checkpointing=false", "data.num_workers=2"),
        *(
            "validation.every_steps=7",
            "logging.every_steps=3",
            "output.keep_checkpoints=9",
            "train.steps=600",
        ),
        *("data.cache_dir=elsewhere", "model.path=elsewhere", "train.cpu_threads=2", "memory.min_bytes=5"),
        *("memory.host_gib=2", "memory.resident_blocks=0", "memory.prefetched_blocks=2"),
    ],
)
def test_settings_that_do_not_decide_the_numbers_may_change(override: str) -> None:
    assert contract(override) == contract()


@pytest.mark.parametrize(
    "override",
    [
        *("lora.rank=4", "lora.dropout=0.1", "lora.target_modules=[to_q]", "objective.logit_mean=0.1"),
        *("train.seed=1", "train.global_batch_size=16", "train.learning_rate=1e-3", "train.warmup_steps=9"),
        *("train.weight_decay=0.1", "train.mixed_precision=bf16", "train.lr_scheduler=cosine"),
        *("data.width=128", "data.repeats=2", "model.dtype=bfloat16", "model.vae_dtype=bfloat16"),
    ],
)
def test_settings_that_decide_the_numbers_are_named_with_both_values(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(DifferentRunError, match=rf"{key} was .*, is .*another output\.dir"):
        require_same(contract(override), contract(), where="runs/a")


def test_the_number_of_steps_is_part_of_a_schedule_that_depends_on_it() -> None:
    cosine = "train.lr_scheduler=cosine"
    with pytest.raises(DifferentRunError, match=r"train\.steps was 300, is 600"):
        require_same(contract(cosine, "train.steps=600"), contract(cosine), where="runs/a")


def test_every_section_is_either_in_the_contract_or_free_to_change() -> None:
    sections = {field.name for field in dataclasses.fields(Config)}
    fixed = {key.partition(".")[0] for key in contract()}
    assert fixed == {"model", "lora", "data", "objective", "train"}
    assert sections - fixed == {"memory", "validation", "logging", "output", "resume"}


def test_the_data_are_their_names_pictures_and_captions_in_order() -> None:
    items = [EncodedItem(name=str(i), latents_key=f"l{i}", caption_key=f"c{i}") for i in range(3)]
    same = data_contract(items)
    assert data_contract(list(items)) == same
    assert data_contract(items[::-1]) != same
    for change in ({"name": "x"}, {"latents_key": "x"}, {"caption_key": "x"}):
        assert data_contract([dataclasses.replace(items[0], **change), *items[1:]]) != same
