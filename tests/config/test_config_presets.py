"""Presets lie on top of a config: what wins, what is said about it, and which recipes take them."""

import logging
from pathlib import Path

import pytest
import yaml

from diffsynth_lite.config import load_config
from diffsynth_lite.config.files import read_config_files, read_preset
from diffsynth_lite.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(path.stem for path in (CONFIGS / "presets").glob("*.yaml"))
RECIPES = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("cards/*.yaml")])


def test_the_presets_are_these():
    assert PRESETS == ["few_pictures", "likeness", "motion", "style"]
    for name in PRESETS:
        settings = yaml.safe_load(read_preset(name).text)
        settings.pop("families", None)
        assert sum(map(len, settings.values())) <= 5
        assert "data" not in settings or "path" not in settings["data"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_all_presets_that_are_for_its_family(path):
    family = _family(path)
    fitting = [name for name in PRESETS if family in (read_preset(name).families or [family])]
    loaded = load_config(path, presets=fitting)
    assert (loaded.config.model.family, loaded.warnings) == (family, ())
    # As each setting was given last.
    expected = {}
    for name in fitting:
        settings = yaml.safe_load(read_preset(name).text)
        settings.pop("families", None)
        expected |= {(section, key): value for section, own in settings.items() for key, value in own.items()}
    if "quickstart" not in path.stem:  # A recipe for a card still fits it.
        assert loaded.config.lora.rank <= load_config(path).config.lora.rank
        assert loaded.config.train.ema_decay is None
    given = {(section, key): getattr(getattr(loaded.config, section), key) for section, key in expected}
    assert given == expected


def _lines(path):
    """Those of a recipe and of the ones that it extends."""
    return [line for file in read_config_files(path) for line in file.text.splitlines()]


def _family(path):
    return next(line.split()[1] for line in _lines(path) if line.startswith("  family: "))


def test_presets_for_clips_are_refused_for_models_of_pictures():
    with pytest.raises(UserError) as caught:
        load_config("qwen_24gb.yaml", presets=["style", "motion"])
    families = "cogvideox, hunyuan_video, hunyuan_video_15, ltx2, ltx_video, wan, wan_i2v, wan_vace"
    assert str(caught.value) == (
        f"--preset motion: is for {families}, and model.family is qwen_image; leave it out"
    )
    of_clips = {_family(path) for path in RECIPES if any("  frame_counts:" in line for line in _lines(path))}
    assert set(read_preset("motion").families) == of_clips


def test_a_preset_wins_over_the_file_and_the_command_line_over_it(write, minimal, tmp_path, caplog):
    path = write(
        f"{minimal}lora:\n  rank: 4\ntrain:\n  steps: 7\n  seed: 3\nvalidation: {{prompts: [a cat]}}\n"
    )
    with caplog.at_level(logging.INFO, "diffsynth_lite"):
        loaded = load_config(path, ["train.steps=9"], presets=["likeness", "few_pictures"])
    train, lora = loaded.config.train, loaded.config.lora
    assert (train.steps, train.seed, lora.rank, lora.dropout) == (9, 3, 8, 0.1)
    assert caplog.messages == [
        "--preset likeness: lora.rank 16 (was 4), train.steps 1000 (was 7), "
        "validation.every_steps 100, output.checkpoint_every_steps 100",
        "--preset few_pictures: lora.rank 8 (was 16), lora.dropout 0.1, train.steps 500 (was 1000), "
        "validation.every_steps 50 (was 100), output.checkpoint_every_steps 50 (was 100)",
    ]
    # The copy in the run folder needs no preset, and leaves out the command line.
    says = "# What recipe.yaml, with --preset likeness --preset few_pictures, says.\n"
    assert loaded.source_text.startswith(says)
    copy = tmp_path / "copy.yaml"
    copy.write_text(loaded.source_text)
    assert load_config(copy, ["train.steps=9"]).config == loaded.config
    assert load_config(copy).config.train.steps == 500


def test_a_problem_that_a_preset_makes_is_at_its_line(write, minimal):
    off = ["validation.item_losses=0", "validation.loss_items=0"]
    few = CONFIGS / "presets" / "few_pictures.yaml"
    at = [number for number, line in enumerate(few.read_text().splitlines(), 1) if "  every_steps:" in line]
    warnings = load_config(write(minimal), off, presets=["few_pictures"]).warnings
    assert [warning.split(": ")[0] for warning in warnings] == [f"{few}:{at[0]} validation.every_steps"]


def test_a_module_of_somebody_else_may_be_of_any_kind(write, minimal):
    path = write(minimal.replace("family: qwen_image", "family: my_package.my_family"))
    assert load_config(path, presets=["motion"]).config.lora.components == ["transformer"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("likenes", "did you mean 'likeness'? There are few_pictures, likeness, motion, style"),
        ("../qwen_lora", "There are few_pictures"),
        ("", "There are few_pictures"),
    ],
)
def test_a_preset_that_is_none_is_answered_with_the_list(write, minimal, name, reason):
    with pytest.raises(UserError) as caught:
        load_config(write(minimal), presets=[name])
    assert str(caught.value).startswith(f"--preset {name}: {reason}")


def test_a_preset_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--config style.yaml: is a preset; give --preset style beside"):
        load_config("style.yaml")
