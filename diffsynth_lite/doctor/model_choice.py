"""This file knows which models fit a graphics card, by the recipes made for one, with sizes and licences."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffsynth_lite.config import load_config, recipes_for_card
from diffsynth_lite.doctor.machine import ask_driver
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.pipelines.base.release_folder import weight_bytes
from diffsynth_lite.training.planning.gpus import Gpu, gpu_of_device


@dataclass(frozen=True, kw_only=True)
class FittingModel:
    """A model that a recipe can train on a card.

    Attributes:
        recipe: file name of the recipe.
        card_gb: memory of the smallest card that it is for.
        facts: see :func:`base_model`.
    """

    family: str
    recipe: str
    card_gb: int
    facts: str


def card_here() -> Gpu | None:
    """The first card that NVIDIA's driver lists; None without one. Torch, which takes seconds to import,
    is not asked."""
    name, _, mib = next(iter(ask_driver("name,memory.total")), "").rpartition(", ")
    return gpu_of_device(name, int(mib) * 2**20) if mib.isdecimal() else None


def recipe_for(recipe: str, memory_gib: float) -> tuple[int, str] | None:
    """The one among a recipe and its versions for cards which makes the most of so much memory.

    Returns:
        The memory of the card that it is for, and its name; None where none is for so little.
    """
    found = next(recipes_for_card(load_config(recipe), memory_gib), None)
    return found and (found[0], found[1].path.name)


def fitting_models(recipes: Sequence[tuple[str, str]], memory_gib: float) -> list[FittingModel]:
    """The models of families that fit a card, those for the smallest cards first.

    Args:
        recipes: names of families, and of the recipe that each starts from.
    """
    found = []
    for family, recipe in recipes:
        if fitting := recipe_for(recipe, memory_gib):
            card_gb, name = fitting
            facts = base_model(family, load_config(recipe).config.model.path)
            found.append(FittingModel(family=family, card_gb=card_gb, recipe=name, facts=facts))
    return sorted(found, key=lambda model: model.card_gb)


def base_model(family: str, path: str) -> str:
    """What is known of a model, such as ``Qwen/Qwen-Image, 57.7 GB to download, Apache-2.0``.

    Args:
        path: as in ``model.path``.
    """
    release = next((one for one in load_family(family).releases if one.hub_id == path), None)
    if release is None:
        return f"{path}, of which neither size nor licence is known here"
    sizes = [
        weight_bytes(one) if one.num_bytes is None else one.num_bytes for one in release.components.values()
    ]
    known = sum(size for size in sizes if size is not None)
    least = "more than " if None in sizes else ""
    gated = "; accept its terms on the hub first" if release.gated else ""
    return f"{path}, {least}{known / 1e9:.1f} GB to download, {release.licence}{gated}"
