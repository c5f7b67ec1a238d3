"""Which recipe is for which graphics card, by what `diffsynth-lite plan` counts of each phase of a run.

A recipe fits where no phase takes more than nine tenths of the card's memory, and of the machine's:
the rest is for what is not counted (CUDA itself, the workspace of kernels, what the allocator cannot use, a
display; the system and its file cache). Two tables: for larger models the recipe for each card, with GiB of
the card and in brackets of host memory; and what each phase takes of each recipe that is for no card by name,
with the smallest card that it fits.

    python scripts/benchmarks/recipes.py [--recipe NAME ...]
    python scripts/benchmarks/recipes.py --check

The second form prints only recipes that do not fit their card, and fails where there are some.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from meters import print_table

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.training.planning.choices import MemoryBudget
from diffsynth_lite.training.planning.memory_count import MemoryCount
from diffsynth_lite.training.planning.phases import Phase, PhaseCounter
from diffsynth_lite.training.planning.subject import (
    counter_of,
    family_without_weights,
    step_settings,
)

CONFIGS = Path(__file__).parents[2] / "configs"
HOSTS = {8: 32, 12: 32, 16: 32, 24: 32, 48: 64, 80: 128}
"""GiB of the machine, by those of the card."""
SHARE = 0.9
"""Of each that a run may take by count."""
GIB = 1024**3
RECIPES: Mapping[str, Sequence[str]] = {
    "Qwen-Image": ("qwen_8gb", "qwen_12gb", "qwen_16gb", "qwen_24gb", "qwen_48gb", "qwen_lora"),
    "FLUX.1 dev": ("flux_8gb", "flux_12gb", "flux_16gb", "flux_24gb", "flux_lora", "flux_80gb"),
    "FLUX.2 dev": ("-", "flux2_12gb", "flux2_16gb", "flux2_24gb", "flux2_48gb", "flux2_lora"),
    "HiDream-I1": (
        *("hidream_8gb", "hidream_8gb", "hidream_16gb", "hidream_24gb", "hidream_lora", "hidream_lora"),
    ),
    "Z-Image": (
        "z_image_8gb",
        "z_image_12gb",
        "z_image_16gb",
        "z_image_lora",
        "z_image_lora",
        "z_image_80gb",
    ),
    "SDXL": ("sdxl_lora", "sdxl_lora", "sdxl_16gb", "sdxl_16gb", "sdxl_16gb", "sdxl_16gb"),
    "Wan 2.1 T2V 14B": (
        *("wan_t2v_14b_8gb", "wan_t2v_14b_12gb", "wan_t2v_14b_16gb", "wan_t2v_14b_24gb"),
        *("wan_t2v_14b_offload", "wan_t2v_14b_80gb"),
    ),
    "Wan 2.2 T2V A14B": (
        *("-", "wan22_t2v_a14b_12gb", "wan22_t2v_a14b_16gb", "wan22_t2v_a14b_24gb"),
        *("wan22_t2v_a14b_48gb", "wan22_t2v_a14b_lora"),
    ),
    "LTX-Video 13B": (
        *("-", "ltx_video_13b_12gb", "ltx_video_13b_16gb", "ltx_video_13b_24gb"),
        *("ltx_video_13b_48gb", "ltx_video_13b_48gb"),
    ),
}
"""Names of the recipe for each card, by model; a dash where none fits."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a recipe takes by count.

    Attributes:
        offload_ratio: part of the host memory next to streamed weights that may hold what is offloaded.
        host_gib: most that these two may take of it.
    """

    phases: list[Phase]
    step: MemoryCount
    offload_ratio: float
    host_gib: float

    @property
    def device(self) -> int:
        """Most on the device in any phase; previews are decoded in tiles where that is needed."""
        return max(phase.least_device for phase in self.phases)

    @property
    def host(self) -> int:
        """Most in host memory in any phase."""
        return max(phase.host for phase in self.phases)

    def fits(self, card: int) -> bool:
        """Whether a card, in a machine as it usually is in, has enough."""
        device, host = SHARE * card * GIB, SHARE * HOSTS[card] * GIB
        room = MemoryBudget(
            device=device, host=min(host, self.host_gib * GIB), offload_ratio=self.offload_ratio
        )
        return all(phase.fits(device, host) for phase in self.phases) and room.fits(self.step)


@cache
def needs_of(name: str) -> Needs:
    """What a recipe takes."""
    config: Config = load_config(f"{name}.yaml").config
    with family_without_weights(config) as family:
        counter, settings = counter_of(config, family), step_settings(config, family)
        host_gib = config.memory.host_gib
        return Needs(
            phases=PhaseCounter(config, family, counter).count(settings),
            step=counter.count(settings),
            # As much as the offload takes where no setting says it.
            offload_ratio=0.5 if host_gib is None else 1.0,
            host_gib=host_gib or math.inf,
        )


def card_row(model: str) -> dict[str, str]:
    """The recipe of a model for each card."""
    cells = {
        f"{card} GB ({host})": name if name == "-" else f"{name}: {_taken(needs_of(name))}"
        for (card, host), name in zip(HOSTS.items(), RECIPES[model], strict=True)
    }
    return {"model": model, **cells}


def recipe_row(name: str) -> dict[str, str]:
    """What each phase of a recipe takes, and its smallest card."""
    needs = needs_of(name)
    phases = {
        phase.name: f"{phase.least_device / GIB:.1f} ({phase.host / GIB:.1f})" for phase in needs.phases
    }
    return {
        "recipe": name,
        **phases,
        "smallest card": next((f"{card} GB" for card in HOSTS if needs.fits(card)), "none of them"),
    }


def too_large() -> list[str]:
    """The recipes that do not fit their card, as lines."""
    return [
        f"{name} on {card} GB, with {HOSTS[card]} GB of host memory: {_taken(needs_of(name))} GiB"
        for names in RECIPES.values()
        for card, name in zip(HOSTS, names, strict=True)
        if name != "-" and not needs_of(name).fits(card)
    ]


def _taken(needs: Needs) -> str:
    return f"{needs.device / GIB:.1f} ({needs.host / GIB:.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or check the recipes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--recipe", action="append", help="print what each phase of these takes, and nothing else"
    )
    parser.add_argument("--check", action="store_true", help="fail where a recipe does not fit its card")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.check:
        sys.exit("\n".join(too_large()) or 0)
    names = [path.stem for path in sorted(CONFIGS.glob("*.yaml")) if "quickstart" not in path.stem]
    names = options.recipe or names
    if not options.recipe:
        print_table("The recipe for each card, in a machine of that many GB.", list(map(card_row, RECIPES)))
    print_table("What each phase takes.", [recipe_row(name) for name in names])


if __name__ == "__main__":
    main()
