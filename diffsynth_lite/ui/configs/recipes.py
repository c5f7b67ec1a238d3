"""This file knows the recipes that a new run can begin from, the cards they fit, and writes a config on one.

What they need was counted when the package was made: ``scripts/recipe_table.py`` writes the table.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from diffsynth_lite.config import load_config
from diffsynth_lite.config.editing import settings_of, with_value
from diffsynth_lite.config.files import read_preset, recipe_table_file, schema_line
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning.gpus import ASSUMED_GPU, GPUS, Gpu, gpu_of_device
from diffsynth_lite.ui.configs.draft import View, changed, on_one_line
from diffsynth_lite.ui.data_sets.items import source_of
from diffsynth_lite.ui.pages import device

GOALS: Mapping[str, tuple[str, str, str]] = {
    "": ("As in the recipe", "sliders", "Nothing on top of it"),
    "likeness": ("Likeness", "face", "One person, animal or thing, to be known again anywhere"),
    "style": ("Style", "style", "The look of many images, whatever they show"),
    "motion": ("Motion", "video", "A movement or a camera move, from clips"),
    "few_pictures": ("Few images", "images", "Some ten images or clips, or fewer"),
}
"""Label, symbol and help of each preset, by its name; of none first."""
_STATES = {"full": "good", "half": "good", "quarter": "warn", "none": "stop", "info": ""}
"""What the symbol of a verdict means, the best first."""
_OF_MEMORY = re.compile(
    r"(model|memory)\..*|data\.(resolutions|frame_counts|width|height|sizes)"
    r"|train\.(micro_batch_size|use_gradient_checkpointing(_offload)?)"
)
"""Settings with which a config needs much more memory than its recipe, or much less."""
_OF_TIME = re.compile(r"train\.(global_batch_size|optimizer|compile)|objective\..*|data\.(sources|preserve)")
"""Of the others, those that change the time of a step."""
_AROUND_NAME = re.compile(
    r"^Trains (a LoRA|the LoRAs) (on|for|of) (the )?((UNet|two experts) of )?"
    r"|,? from a folder of (images|clips)$"
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a recipe.

    Attributes:
        recipe: the file that is extended: the recipe, or its version for a card.
        settings: on top of that file, by key.
        means: what saves memory in it, such as "int8" and "streaming"; none where it is as the recipe is.
        device_gib: of the card, by count, in the largest phase of a run.
        host_gib: the same of host memory.
        only_training: whether other phases are not counted, as the model's family loads it in its own way.
        step_s: estimated seconds of a step, by names of the cards whose fastest way it is.
    """

    recipe: str
    settings: Mapping[str, Any]
    means: Sequence[str]
    device_gib: float
    host_gib: float
    only_training: bool = False
    step_s: Mapping[str, float] = field(default_factory=dict)

    def time_on(self, gpu: Gpu) -> str:
        """Of a step, to follow other words; empty where it is not known."""
        return f", {self.step_s[gpu.name]:.3g} s a step" if gpu.name in self.step_s else ""

    @property
    def typed(self) -> dict[str, str]:
        """The settings as they are typed into fields."""
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.settings.items()
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a card can train a recipe, and how, as the screen shows it."""

    words: str
    symbol: str
    needs: str = ""

    @property
    def state(self) -> str:
        return _STATES[self.symbol]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe of the table.

    Attributes:
        kind: "images", "video" or "edits".
        download: size of its files, such as "57.7 GB"; empty where it is not known, as is ``licence``.
        ways: the fastest first, which needs the most memory; none where that cannot be counted.
    """

    recipe: str
    purpose: str
    kind: str
    model: str
    download: str
    licence: str
    gated: bool
    ways: Sequence[Way]

    @property
    def name(self) -> str:
        """The model, and what is special: what the first sentence of the recipe has of them."""
        name = _AROUND_NAME.sub("", self.purpose)
        return name[:1].upper() + name[1:]

    def verdict(self, gpu: Gpu) -> Verdict:
        """Whether a card can train it."""
        way = self.way_for(gpu)
        if not self.ways:
            return Verdict(words="not counted", symbol="info")
        if way is None:
            least = f"{self.ways[-1].device_gib:.1f} GiB at least, of {gpu.training_gib:.1f}"
            return Verdict(words="not on this card", symbol="none", needs=least)
        needs = f"{way.device_gib:.1f} of {gpu.training_gib:.1f} GiB, host {way.host_gib:.1f}"
        needs += f"{' (training only)' * way.only_training}{way.time_on(gpu)}"
        if not way.means:
            return Verdict(words="fits as it is", symbol="full", needs=needs)
        symbol = "half" if set(way.means) == {"int8"} else "quarter"
        return Verdict(words=f"with {' + '.join(way.means)}", symbol=symbol, needs=needs)

    def way_for(self, gpu: Gpu) -> Way | None:
        """The fastest that fits a card; None where none does."""
        return next((way for way in self.ways if way.device_gib <= gpu.training_gib), None)


@cache
def recipes() -> Sequence[Recipe]:
    """The table."""
    rows = json.loads(recipe_table_file().read_text(encoding="utf-8"))
    return [Recipe(**row | {"ways": [Way(**way) for way in row["ways"]]}) for row in rows]


def verdicts(gpu: Gpu) -> list[tuple[Recipe, Verdict]]:
    """Each recipe with whether a card can train it, those that fit it best first."""
    found = [(recipe, recipe.verdict(gpu)) for recipe in recipes()]
    return sorted(found, key=lambda pair: list(_STATES).index(pair[1].symbol))


def recipe_named(name: str) -> Recipe:
    """The recipe of that file."""
    found = next((each for each in recipes() if each.recipe == name), None)
    if found is None:
        raise UserError(f"recipe: {name}: is not in the table; choose one of it")
    return found


def cards() -> Mapping[str, Gpu]:
    """The cards to choose from, by name; the one of this machine, or a common one, comes first."""
    here = device()
    own = gpu_of_device(here["name"], here["total"] * 1024**3) if here else None
    first = own or next(gpu for gpu in GPUS if gpu.name == ASSUMED_GPU)
    others = sorted(GPUS, key=lambda gpu: gpu.name)
    return {gpu.name: gpu for gpu in (first, *others)}


def needs_of(view: View) -> str:
    """What the file that a config extends needs, by the table; empty where the config changes that."""
    own = {
        key: value.value for key, value in view.values.items() if value.is_own and _OF_MEMORY.fullmatch(key)
    }
    ways = (way for recipe in recipes() for way in recipe.ways if way.recipe == view.extends)
    way = next((way for way in ways if own == way.typed), None)
    if way is None:
        return ""
    gpu = next(iter(cards().values())) if device() else None
    limit = f" of {gpu.training_gib:.1f}" if gpu else ""
    card = f" of your {gpu.name}" if gpu else " of the card"
    changes_time = any(value.is_own and _OF_TIME.fullmatch(key) for key, value in view.values.items())
    time = way.time_on(gpu) if gpu and not changes_time else ""
    return f"{way.device_gib:.1f}{limit} GiB{card}, and {way.host_gib:.1f} GiB of host memory{time}"


def text_on_recipe(recipe: Recipe, way: Way | None, *, name: str, data: Path | str, goal: str) -> str:
    """A config on top of a recipe.

    Args:
        way: to train it on a card; None for the recipe as it is.
        data: folder of the data set, as the config is to have it; as text, its id on the hub.
        goal: name of a preset; empty for none.
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
    source = {"data.path": str(data)}
    if isinstance(data, str):
        column = "video" if recipe.kind == "video" else "image"  # where most of the hub have it
        source = {"data.path": "", "data.dataset": data, "data.media_column": column}
    typed = {**source, "output.dir": f"runs/{name}", **(way.typed if way else {})}
    if not config.validation.inputs and not config.validation.control:  # these belong to the recipe's prompts
        typed["validation.prompts"] = "\n".join([*_first_caption(data), *config.validation.prompts[-1:]])
    for key, value in typed.items():
        text = changed(text, key, value)
    for key, node in settings_of([preset] if preset else []).items():
        text = with_value(text, key, on_one_line(node))
    return text


def _first_caption(data: Path | str) -> Iterator[str]:
    """A caption of the data set, which previews then begin with; none of one that is not here yet."""
    if isinstance(data, str):
        return
    found = find_records([source_of(data, None)], media_store=data, on_bad_item="skip", logs_skipped=False)
    captions = (text for record in found.records for text in record.captions[:1])
    yield from [text for text in captions if text.isprintable() and "${" not in text][:1]
