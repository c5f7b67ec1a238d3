"""Recipes for cards are checked by the count of plan, and there is one for every card."""

import json
from pathlib import Path

import pytest
import recipes
from recipe_table import way
from recipes import HOSTS, RECIPES, main

from diffsynth_lite.config import load_config
from diffsynth_lite.config.files import recipe_table_file
from diffsynth_lite.training.planning.gpus import GPUS

CARDS = Path(__file__).parents[2] / "configs" / "cards"


def test_a_recipe_that_does_not_fit_its_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "RECIPES", {"Z-Image": ("-", *("z_image_lora",) * (len(HOSTS) - 1))})
    with pytest.raises(SystemExit) as ended:
        main(["--check"])
    assert isinstance(ended.value.code, str)
    assert [line.partition(",")[0] for line in ended.value.code.splitlines()] == [
        "z_image_lora on 12 GB",
        "z_image_lora on 16 GB",
    ]


def test_the_table_of_the_screen_has_what_is_counted() -> None:
    rows = {row["recipe"]: row for row in json.loads(recipe_table_file().read_text(encoding="utf-8"))}
    loaded = load_config("z_image_lora.yaml")
    faster, listed, *_ = rows["z_image_lora.yaml"]["ways"]
    counted = way(loaded, loaded, {}, below_gib=faster["device_gib"])
    assert counted == listed, "run scripts/recipe_table.py"
    assert counted["step_s"].keys() < {gpu.name for gpu in GPUS}


def test_every_recipe_for_a_card_belongs_to_a_model_whose_settings_are_those_of_its_own_recipe() -> None:
    named = {name for names in RECIPES.values() for name in names}
    assert {path.stem for path in CARDS.glob("*.yaml")} == {name for name in named if name.endswith("gb")}
    for names in RECIPES.values():
        configs = [load_config(f"{name}.yaml").config for name in names if name != "-"]
        # A run may continue with the recipe of another card where the format of the model is the same.
        for section in ("lora", "objective", "output"):
            assert len({getattr(config, section).model_dump_json() for config in configs}) == 1
        assert len({config.model.path for config in configs}) == 1


def test_the_readme_names_the_recipe_for_each_card() -> None:
    lines = (CARDS.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    heading = f"| model | {' | '.join(f'{card} GB' for card in HOSTS)} |"
    first = lines.index(heading) + 2
    rows = [line.strip("| ").split(" | ") for line in lines[first : first + len(RECIPES)]]
    for (model, names), row in zip(RECIPES.items(), rows, strict=True):
        folders = ["cards/" if name.endswith("gb") else "" for name in names]
        links = [
            name if name == "-" else f"[`{name}`](configs/{folder}{name}.yaml)"
            for name, folder in zip(names, folders, strict=True)
        ]
        assert row == [model, *links]
