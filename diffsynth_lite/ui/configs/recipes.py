"""This file knows the recipes that a new run can begin from, and which of them a card can train.

What they need was counted when the package was made: ``scripts/recipe_table.py`` writes the table.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from diffsynth_lite.config.files import recipe_table_file
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning.gpus import ASSUMED_GPU, GPUS, Gpu, gpu_of_device
from diffsynth_lite.ui.configs.draft import View
from diffsynth_lite.ui.pages import device

_OF_MEMORY = re.compile(
    r"(model|memory)\..*|data\.(resolutions|frame_counts|width|height|sizes)"
    r"|train\.(micro_batch_size|use_gradient_checkpointing(_offload)?)"
)
"""Settings with which a config needs much more memory than its recipe, or much less."""
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
    """

    recipe: str
    settings: Mapping[str, Any]
    means: Sequence[str]
    device_gib: float
    host_gib: float
    only_training: bool = False

    @property
    def typed(self) -> dict[str, str]:
        """The settings as they are typed into fields."""
        return {
            key: str(value).lower() if value is True else str(value) for key, value in self.settings.items()
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a card can train a recipe, and how, as the screen shows it.

    Attributes:
        state: "good", "warn" or "stop".
    """

    words: str
    symbol: str
    state: str
    needs: str = ""


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
            return Verdict(words="not counted", symbol="info", state="")
        if way is None:
            least = f"{self.ways[-1].device_gib:.1f} GiB at least, of {gpu.training_gib:.1f}"
            return Verdict(words="not on this card", symbol="none", state="stop", needs=least)
        needs = f"{way.device_gib:.1f} of {gpu.training_gib:.1f} GiB, host {way.host_gib:.1f}"
        needs += " (training only)" if way.only_training else ""
        if not way.means:
            return Verdict(words="fits as it is", symbol="full", state="good", needs=needs)
        is_slow = any(one != "int8" for one in way.means)
        symbol, state = ("quarter", "warn") if is_slow else ("half", "good")
        return Verdict(words=f"with {' + '.join(way.means)}", symbol=symbol, state=state, needs=needs)

    def way_for(self, gpu: Gpu) -> Way | None:
        """The fastest that fits a card; None where none does."""
        return next((way for way in self.ways if way.device_gib <= gpu.training_gib), None)


@cache
def recipes() -> Sequence[Recipe]:
    """The table."""
    rows = json.loads(recipe_table_file().read_text(encoding="utf-8"))
    return [Recipe(**row | {"ways": [Way(**way) for way in row["ways"]]}) for row in rows]


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
    return f"{way.device_gib:.1f}{limit} GiB{card}, and {way.host_gib:.1f} GiB of host memory"
