"""This file writes the text of a new config: on top of a recipe, or a copy of another config."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from diffsynth_lite.config import load_config
from diffsynth_lite.config.editing import settings_of, with_value
from diffsynth_lite.config.files import read_preset, schema_line
from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError
from diffsynth_lite.ui.configs.draft import changed, on_one_line
from diffsynth_lite.ui.configs.recipes import Recipe, Way

GOALS: Mapping[str, tuple[str, str, str]] = {
    "": ("As in the recipe", "sliders", "Nothing on top of it"),
    "likeness": ("Likeness", "face", "One person, animal or thing, to be known again anywhere"),
    "style": ("Style", "style", "The look of many images, whatever they show"),
    "motion": ("Motion", "video", "A movement or a camera move, from clips"),
    "few_pictures": ("Few images", "images", "Some ten images or clips, or fewer"),
}
"""Label, symbol and help of each preset, by its name; of none first."""


def text_on_recipe(recipe: Recipe, way: Way | None, *, name: str, data: Path, goal: str) -> str:
    """A config on top of a recipe.

    Args:
        way: to train it on a card; None for the recipe as it is.
        data: folder of the data set, as the config is to have it.
        goal: name of a preset; empty for none.

    Raises:
        UserError: the goal is none, or not one for this model.
    """
    if goal not in GOALS:
        raise UserError(f"goal: {goal}: choose one of {', '.join(filter(None, GOALS))}, or none")
    extended = way.recipe if way else recipe.recipe
    config = load_config(extended).config
    preset = read_preset(goal) if goal else None
    if preset:
        preset.require_fit(config.model.family)
    about = f"{name}: {recipe.name}, from {data}"
    about += f", with the settings of the preset {goal}" if goal else ""
    text = f"{schema_line()}\n# {about}.\n\nextends: {extended}\n"
    typed = {"data.path": str(data), "output.dir": f"runs/{name}", **(way.typed if way else {})}
    if not config.validation.inputs and not config.validation.control:  # these belong to the recipe's prompts
        typed["validation.prompts"] = "\n".join([*_first_caption(data), *config.validation.prompts[-1:]])
    for key, value in typed.items():
        text = changed(text, key, value)
    for key, node in settings_of([preset] if preset else []).items():
        text = with_value(text, key, on_one_line(node))
    return text


def copied_text(text: str, name: str) -> str:
    """A config with a run folder of its own; all else is as in the one that is copied."""
    return changed(text, "output.dir", f"runs/{name}")


def _first_caption(data: Path) -> Iterator[str]:
    """A caption of the data set, which previews then begin with."""
    found = find_records([Source(path=str(data))], media_store=data, on_bad_item="skip", logs_skipped=False)
    captions = (text for record in found.records for text in record.captions[:1])
    yield from [text for text in captions if text.isprintable() and "${" not in text][:1]
