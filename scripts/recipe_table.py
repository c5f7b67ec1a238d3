"""Writes ``configs/recipes.json``: what New run of the screen says of each recipe, counted by the planner.

A recipe can be trained in one way or more: as it is, in its versions for cards, or, without these, in int8
and with its weights streamed. The table has the memory that each takes by count in its largest phase, and the
time of a step on each card that is trained on in this way. Recipes of the mini models are left out, and that
of a slider, which needs no data set. Counting takes some ten minutes; ``--recipe NAME`` counts one and
prints it.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from models_page import read_recipes

from diffsynth_lite.config import LoadedConfig, load_config, recipes_for_card
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.pipelines.base.release_folder import weight_bytes
from diffsynth_lite.training.planning.choices import as_overrides
from diffsynth_lite.training.planning.gpus import GPUS
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.plan_input import PlanInput
from diffsynth_lite.training.planning.planner import RunPlanner
from diffsynth_lite.training.planning.subject import family_without_weights

CONFIGS = Path(__file__).parents[1] / "configs"
TABLE = CONFIGS / "recipes.json"
_ANY_CARD_GIB = 1000
_IN_INT8 = {"model.quantize": "int8"}
_STREAMED = _IN_INT8 | {"memory.stream_blocks": "all", "memory.stream_text_encoder": True}
_IN_TILES = _STREAMED | {"model.vae_tiling": True}
_GIB = 1024**3


def named() -> dict[str, str]:
    """The recipes with their first sentences, and of models that only recipes for cards have the largest."""
    others = ("quickstart.yaml", "video_quickstart.yaml", "slider.yaml")
    found = {one.name: one.purpose for one in read_recipes(CONFIGS) if one.name not in others}
    models = {load_config(name).config.model.path for name in found}
    cards = sorted(CONFIGS.glob("cards/*.yaml"), key=lambda path: -int(path.stem.rpartition("_")[2][:-2]))
    for path in cards:
        if (model := load_config(path).config.model.path) not in models:
            models.add(model)
            head = path.read_text(encoding="utf-8").splitlines()[1]
            found[path.name] = head.removeprefix("# ").partition(" on a card")[0]
    return dict(sorted(found.items()))


def row(name: str, purpose: str) -> dict[str, Any]:
    """What is known of a recipe.

    Args:
        purpose: its first sentence.
    """
    loaded = load_config(name)
    config = loaded.config
    kind = "video" if config.data.frame_counts else "edits" if config.data.input_columns else "images"
    return {
        "recipe": name,
        "purpose": purpose,
        "kind": kind,
        "model": config.model.path,
        **_release(config.model.family, config.model.path),
        "ways": list(_ways(loaded)),
    }


def _release(family: str, model: str) -> dict[str, Any]:
    """Size and licence; nothing of a model that is not known."""
    release = next((one for one in load_family(family).releases if one.hub_id == model), None)
    if release is None:
        return {"download": "", "licence": "", "gated": False}
    parts = release.components.values()
    sizes = [weight_bytes(part) if part.num_bytes is None else part.num_bytes for part in parts]
    known = sum(size for size in sizes if size is not None)
    least = "more than " if None in sizes else ""
    return {
        "download": f"{least}{known / 1e9:.1f} GB" if known else "",
        "licence": release.licence,
        "gated": bool(release.gated),
    }


def _ways(loaded: LoadedConfig) -> Iterator[dict[str, Any]]:
    """From the fastest to the one that needs the least memory; each needs less than the one before."""
    versions = [found for _, found in recipes_for_card(loaded, _ANY_CARD_GIB)]
    if all(found.path == loaded.path for found in versions):
        tried = [
            (load_config(loaded.path, as_overrides(changes)), changes)
            for changes in ({}, _IN_INT8, _STREAMED, _IN_TILES)
        ]
    else:
        tried = [(found, {}) for found in versions]
    least = math.inf
    for found, changes in tried:
        with suppress(UserError):  # not counted without the weights, such as a training adapter
            counted = way(found, loaded, changes, below_gib=least)
            if counted["device_gib"] < least:
                least = counted["device_gib"]
                yield counted


def way(
    found: LoadedConfig, recipe: LoadedConfig, changes: Mapping[str, Any], *, below_gib: float
) -> dict[str, Any]:
    """What is known of one way to train a recipe.

    Args:
        below_gib: what the next faster way needs: cards with more are trained on in that one.
    """
    config = found.config
    with family_without_weights(config) as family:
        asked = PlanInput.of(found, family)
        planner = RunPlanner(asked, family, KeptCounts(None, family))
        configured = planner.as_configured
        device_gib = round(configured.device_in(None) / _GIB, 1)
        cards = [gpu for gpu in GPUS if gpu.is_timed and device_gib <= gpu.training_gib < below_gib]
        step_s = {gpu.name: float(f"{planner.seconds_on(gpu):.3g}") for gpu in cards}
    means = {
        config.model.quantize: config.model.quantize != "none",
        "streaming": config.memory.stream_blocks != 0,
        "VAE in tiles": config.model.vae_tiling and not recipe.config.model.vae_tiling,
        "shorter clips": config.data.frame_counts != recipe.config.data.frame_counts,
    }
    return {
        "recipe": found.path.name,
        "settings": changes,
        "means": [name for name, is_used in means.items() if is_used],
        "device_gib": device_gib,
        "host_gib": round(configured.host_in(None) / _GIB, 1),
        "only_training": bool(configured.uncounted),
        "step_s": step_s,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, or print one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--recipe", metavar="NAME", help="print the row of this file, and write nothing")
    chosen = parser.parse_args(arguments).recipe
    torch.set_num_threads(1)
    rows = []
    for name, purpose in named().items():
        if name == (chosen or name):
            print(name, file=sys.stderr)
            rows.append(row(name, purpose))
    text = ",\n".join(json.dumps(row) for row in rows)
    if chosen:
        print(text)
    else:
        TABLE.write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
