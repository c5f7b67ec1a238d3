"""docs/models.md and the README say what the families' files and the recipes say."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from models_page import BY_THE_FOLDER, facts, read_recipes, render_models_page, render_readme
from noise_table import noise_section

from diffsynth_lite.pipelines import ModelFamily, family_names, load_family
from diffsynth_lite.pipelines.chroma import Chroma
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.wan import Wan

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
PAGE = REPOSITORY / "docs" / "models.md"
README = REPOSITORY / "README.md"


def test_the_page_is_the_one_that_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_models_page(CONFIGS), "run scripts/generate_docs.py"


def test_the_table_of_the_readme_is_the_one_that_is_generated_and_has_a_row_for_every_family() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == render_readme(text), "run scripts/generate_docs.py"
    assert re.findall(r"^\| \[`(\w+)`\]\(docs/models\.md#\1\) \| \S", text, re.M) == family_names()


def test_every_family_has_a_row_and_a_section_and_every_recipe_is_in_both() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table, *sections, untrained = page.split("\n## ")
    assert untrained.startswith("Not trained\n")
    assert [section.splitlines()[0] for section in sections] == family_names()
    by_family = dict(zip(family_names(), sections, strict=True))
    recipes = read_recipes(CONFIGS)
    assert {recipe.name for recipe in recipes} == {path.name for path in CONFIGS.glob("*.yaml")}
    for recipe in recipes:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| [`{recipe.family}`]")]
        assert f"(../configs/{recipe.name})" in row
        assert f"(../configs/{recipe.name})" in by_family[recipe.family]


@pytest.mark.parametrize("name", family_names())
def test_a_family_says_what_it_covers_in_one_line(name: str) -> None:
    first, _, rest = (load_family(name).__doc__ or "").partition("\n")
    assert first.endswith(".")
    assert not rest.split("\n")[0].strip()


def test_noise_levels_are_those_of_recipes_whose_release_is_known() -> None:
    class WithoutReleases(Flux):
        """A family of its own."""

    recipe = CONFIGS / "flux_lora.yaml"
    assert any(recipe.name in line for line in noise_section(Flux, [recipe]))
    assert noise_section(WithoutReleases, [recipe]) == []


def test_facts_that_depend_on_the_folder_are_those_of_the_docstrings() -> None:
    known = facts(Wan)
    assert known["width and height, multiples of"] == "16; 32 with TI2V-5B"
    assert (known["frames"], known["frames a second"]) == ("4 k + 1", "16; 24 with TI2V-5B")
    assert known["LoRA file"].endswith("of `WanLoraLoaderMixin` and for ComfyUI")
    assert "input images" not in known
    assert facts(Chroma)["LoRA file"].endswith(", but for what a LoRA has on `distilled_guidance_layer*`")


def test_a_family_of_other_parts_than_diffusers_transformers_has_facts_too() -> None:
    class Other(ModelFamily):
        """Another."""

        pipeline_classes = ("OtherPipeline",)
        components = ("unet", "vae")
        record_kinds = ("edit",)
        max_prompt_tokens = 77
        default_target_modules = ("to_q",)

        @cached_property
        def block_lists(self) -> tuple[str, ...]:
            """Those of the UNet's levels."""
            return tuple(self.folder.pipeline_config())

        @property
        def size_divisor(self) -> int:
            return 8

        @property
        def lora_files(self) -> Any:
            """Two files.

            With more to say of them.
            """

    known = facts(Other)
    assert known["blocks, in call order"] == "Those of the UNet's levels"
    assert known["input images"] == "any number"
    assert known["width and height, multiples of"] == BY_THE_FOLDER
    assert known["LoRA file"] == "Two files"
    assert "model" not in known
    assert "frames" not in known
