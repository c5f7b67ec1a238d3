"""This file knows which models fit a graphics card, by the recipes made for one, with sizes and licences."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from diffsynth_lite.config import find_config_file, load_config
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.pipelines.base.release_folder import weight_bytes
from diffsynth_lite.training.planning.gpus import Gpu, gpu_of_device

_FITS = re.compile(r"fits a card of (\d+) GB")
"""In the head of a recipe; scripts/benchmarks/recipes.py checks it."""
_OF_CARD = re.compile(r"_(\d+)gb\.yaml$")
_SMI = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SMI_LIMIT_S = 20


@dataclass(frozen=True, kw_only=True)
class FittingModel:
    """A model that a recipe can train on a card.

    Attributes:
        recipe: file name of the recipe.
        card_gb: memory of the smallest card that it is for.
        facts: what :func:`base_model` says of it.
    """

    family: str
    recipe: str
    card_gb: int
    facts: str


def card_here() -> Gpu | None:
    """The first card that NVIDIA's driver lists; None without one, or where the table of cards has none like
    it. Torch, which takes seconds to import, is not asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *_SMI], capture_output=True, text=True, check=False, timeout=_SMI_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs is for the doctor to report
        return None
    name, _, mib = done.stdout.partition("\n")[0].rpartition(", ")
    return gpu_of_device(name, int(mib) * 2**20) if mib.isdecimal() else None


def recipe_for(recipe: str, memory_gib: float) -> tuple[int, str] | None:
    """The one among a recipe and those that extend it for a card which makes the most of so much memory.

    Returns:
        The memory of the card that it is for, and its name; None where none is for so little.
    """
    file = find_config_file(recipe)
    model = load_config(recipe).config.model.path
    by_memory = {int(gb): recipe for gb in _FITS.findall(file.read_text(encoding="utf-8"))[:1]}
    for path in (file.parent / "cards").glob("*.yaml"):
        card, extends = _OF_CARD.search(path.name), f"\nextends: {recipe}\n"
        if not card or extends not in path.read_text(encoding="utf-8"):
            continue
        if load_config(path.name).config.model.path == model:
            by_memory[int(card[1])] = path.name
    return max(((gb, name) for gb, name in by_memory.items() if gb <= memory_gib), default=None)


def fitting_models(recipes: Sequence[tuple[str, str]], memory_gib: float) -> list[FittingModel]:
    """The models of families that fit a card, those for the smallest cards first.

    Args:
        recipes: names of families, and of the recipe that each starts from.
    """
    found = []
    for family, recipe in recipes:
        if fitting := recipe_for(recipe, memory_gib):
            card_gb, name = fitting
            facts = base_model(family, recipe)
            found.append(FittingModel(family=family, card_gb=card_gb, recipe=name, facts=facts))
    return sorted(found, key=lambda model: model.card_gb)


def base_model(family: str, recipe: str) -> str:
    """What a recipe trains, such as ``Qwen/Qwen-Image, 57.7 GB to download, Apache-2.0``."""
    path = load_config(recipe).config.model.path
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
