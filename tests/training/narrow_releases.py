"""Releases of which the planner counts a narrow variant, and their families in a folder with its config."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diffsynth_lite.pipelines import Conditioning, ModelFamily, load_family, releases_of
from diffsynth_lite.pipelines.base.release_folder import full_config, write_release
from diffsynth_lite.releases.release import Pixels


@dataclass(frozen=True, kw_only=True)
class NarrowRelease:
    """A release and what makes it narrow.

    Attributes:
        family: its name.
        name: of one of the family's releases.
        depths: settings of the transformer with numbers of blocks.
        small: further settings of it, for a CPU.
        small_pixels: width, height and frames that a CPU takes.
    """

    family: str
    name: str
    depths: tuple[str, ...] = ("num_layers",)
    small: Mapping[str, Any]
    small_pixels: Pixels = (256, 256, 1)


FLUX = NarrowRelease(
    family="flux",
    name="FLUX.1 dev",
    depths=("num_layers", "num_single_layers"),
    small={"num_attention_heads": 2},
)
QWEN_IMAGE = NarrowRelease(family="qwen_image", name="Qwen-Image", small={"num_attention_heads": 2})
WAN = NarrowRelease(
    family="wan",
    name="Wan 2.1 T2V 14B",
    small={"num_attention_heads": 2, "ffn_dim": 691},
    small_pixels=(224, 128, 33),
)
NARROW = (FLUX, QWEN_IMAGE, WAN)


@contextmanager
def narrow_family(release: NarrowRelease, num_blocks: int) -> Iterator[ModelFamily]:
    """The family of a release in a folder with the config of its narrow variant.

    Args:
        release: which one.
        num_blocks: of each of its block lists.
    """
    released = next(one for one in releases_of(release.family) if one.name == release.name)
    with TemporaryDirectory() as path:
        family = load_family(release.family)(write_release(released, Path(path)))
        (name,) = family.trained
        config = full_config(released.components[name]) | dict.fromkeys(release.depths, num_blocks)
        (Path(path) / name / "config.json").write_text(json.dumps(config | dict(release.small)))
        yield family


def conditioning_of(family: ModelFamily, pixels: Pixels) -> Conditioning:
    """What the family's encoders would give for one sample, of ones."""
    conditioning = family.example_conditioning(family.latents_shape(*pixels))
    assert conditioning is not None
    return conditioning
