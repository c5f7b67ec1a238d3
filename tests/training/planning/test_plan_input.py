"""What a plan depends on: all that the planner reads is in its input, and nothing else changes a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_kept_counts import another, leaves
from test_memory_count import config_of

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.config.data import DataSettings, SourceSettings
from diffsynth_lite.config.settings import Settings
from diffsynth_lite.core.gradient import KEEP
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.planning import choices
from diffsynth_lite.training.planning.answer import Answer
from diffsynth_lite.training.planning.gpus import gpu_named
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.plan_input import _READ, _READ_WHETHER, PlanInput, planned, room_of
from diffsynth_lite.training.planning.planner import RunPlanner
from diffsynth_lite.training.planning.subject import with_changes

READ = {f"{section}.{name}" for section, names in _READ.items() for name in names.split()} | {"data.sources"}
READ_WHETHER = {f"{section}.{name}" for section, names in _READ_WHETHER.items() for name in names.split()}
WITHOUT_EFFECT = {
    *(
        "train.learning_rate",
        "train.steps",
        "train.warmup_steps",
        "lora.alpha",
    ),  # of an optimizer that is tried
    # Of a preview whose numbers do not matter, in few steps.
    *("validation.seed", "validation.negative_prompt", "validation.num_inference_steps"),
}
"""What is read all the same."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))


def input_of(config: Config, family: ModelFamily) -> PlanInput:
    """Of a card that is too small, so that everything is tried."""
    room = room_of(1e-3, float("inf"))
    return PlanInput(config=config, room=room, gpu=gpu_named("RTX 4090"))


def answer(asked: PlanInput, family: ModelFamily) -> dict[str, Any]:
    return Answer(RunPlanner(asked, family, KeptCounts(None, family)), asked).as_json()


@pytest.mark.parametrize("name", ["qwen_image", "wan"])
def test_no_setting_outside_of_its_input_changes_a_plan_or_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(name, tmp_path / "tiny", "validation.prompts=[one]")
    family = bind_family(config)
    whole = answer(input_of(planned(config), family), family)
    others = {
        key: another(value, kind)
        for key, value, kind in leaves(config)
        if key not in READ and (value or key not in READ_WHETHER)
    }
    # Each of these is refused next to another one.
    clashing = {key for key in others if key.endswith(("_column", "_dir", "split", "a.revision", "_masks"))}
    changed = with_changes(
        config, {key: others[key] for key in others if key not in clashing | {"data.dataset"}}
    )
    with monkeypatch.context() as patched:
        read = noted(patched, config)
        assert answer(input_of(changed, family), family) == whole
    assert "train.mixed_precision" in read
    assert read - READ - READ_WHETHER <= WITHOUT_EFFECT


def noted(patched: pytest.MonkeyPatch, config: Config) -> set[str]:
    """The settings that are read, by dotted key; sources are made of all settings of data."""
    sections = {type(settings): name for name, settings in config} | {SourceSettings: "data"}
    read, kept, sources_of = set[str](), Settings.__getattribute__, DataSettings.sources_by_key.fget
    assert sources_of is not None

    def noting(settings: Settings, name: str) -> Any:
        if name in type(settings).model_fields and type(settings) in sections:
            read.add(f"{sections[type(settings)]}.{name}")
        return kept(settings, name)

    def sources(data: DataSettings) -> Any:
        before = set(read)
        found = sources_of(data)
        read.clear()
        read.update(before)
        return found

    patched.setattr(Settings, "__getattribute__", noting)
    patched.setattr(DataSettings, "sources_by_key", property(sources))
    return read


def test_an_input_has_what_is_read_and_nothing_else(tmp_path: Path) -> None:
    config = config_of("qwen_image", tmp_path / "tiny", "validation.prompts=[one]")
    before = planned(config)
    for key, value, kind in leaves(config):
        changed = [SourceSettings(path="a")] if key == "data.sources" else another(value, kind)
        after = planned(with_changes(config, {key: changed}))
        is_there_before_and_after = key in READ_WHETHER and bool(value)
        assert (after != before) == ((key in READ | READ_WHETHER) and not is_there_before_and_after), key
    assert planned(with_changes(config, {"validation.prompts": []})) != before
    sources = (
        [SourceSettings(path="a", repeats=number, trigger=word)]
        for number, word in ((1, "a"), (1, "b"), (2, "a"))
    )
    first, same, other = (planned(with_changes(config, {"data.sources": one})) for one in sources)
    assert first == same != other


def test_a_recipe_for_a_card_is_part_of_an_input(tmp_path: Path) -> None:
    given = ["data.path=x", "output.dir=y", f"model.path={tmp_path / 'tiny'}"]
    config_of("qwen_image", tmp_path / "tiny")
    loaded = load_config("qwen_lora.yaml", given)
    family = bind_family(loaded.config)

    def of(gib: float | None, *more: str) -> PlanInput:
        room, overrides = room_of(gib, float("inf")), [*given, *more]
        loaded = load_config("qwen_lora.yaml", overrides)
        return PlanInput.of(loaded, family, room=room, overrides=overrides, presets=())

    assert of(None).recipes == ()
    ((name, _),) = of(21.6).recipes
    assert name == "qwen_24gb.yaml"
    assert "model.quantize" in of(21.6).other_numbers[name]
    assert of(21.6, "train.steps=7", "data.trigger=a") == of(21.6)
    assert of(21.6, "train.steps=7").steps == 7
    assert of(21.6, "lora.rank=7") != of(21.6)
    assert replace(of(21.6), num_processes=2) != of(21.6)
