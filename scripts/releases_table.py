"""Renders what is known of a family's releases, as a table of ``docs/models.md``.

Each release is written out as a folder without weights, and the family bound to it is asked. Its model is
built on the meta device: nothing is downloaded.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from diffsynth_lite.lora import adapter_size, find_target_layers
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.release_folder import num_parameters, weight_bytes, write_release
from diffsynth_lite.releases import Release, ReleaseComponent

RANK = 16

EXPLANATION = f"""\
Each family's section ends with its releases: the parameters that are trained, those of the text encoders and
those of a LoRA of rank {RANK} on the default layers; latents, tokens and the shift of the noise levels at the
size that they make; the bytes of all weights as released. All of it is counted on empty models, from settings
whose sources are in [`diffsynth_lite/releases`](../diffsynth_lite/releases). What has no source is marked;
repositories that are known to be gated are marked. `diffsynth-lite doctor` shows which of them a folder is.
"""

_HEADINGS = (
    "release",
    "trained",
    "text encoders",
    f"LoRA of rank {RANK}",
    "size",
    "latents",
    "tokens",
    "shift",
    "weights",
    "licence",
    "not confirmed",
)


def releases_section(family: type[ModelFamily]) -> list[str]:
    """Lines of Markdown."""
    if not family.releases:
        return ["No release of this family is known by its numbers.", ""]
    rows = [_row(family, release) for release in family.releases]
    return [
        f"| {' | '.join(_HEADINGS)} |",
        f"|{'---|' * len(_HEADINGS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _row(family_class: type[ModelFamily], release: Release) -> Sequence[str]:
    with TemporaryDirectory() as path:
        family = family_class(write_release(release, Path(path)))
        shape = family.latents_shape(*release.size)
        model = family.empty_transformer()
        layers = find_target_layers(
            model, family.default_target_modules, unused_modules=family.unused_modules(model)
        )
        trained = {
            name: sum(map(torch.numel, part.parameters())) for name, part in family.parts_of(model).items()
        }
        readers = [
            num_parameters(component)
            for name, component in release.components.items()
            if name.startswith("text_encoder")
        ]
        width, height, num_frames = release.size
        return (
            f"[{release.name}](https://huggingface.co/{release.hub_id})",
            " + ".join(map(_count, trained.values())),
            " + ".join(map(_count, readers)),
            _count(adapter_size(model, layers, rank=RANK)),
            f"{width}x{height}" + (f"x{num_frames}" if num_frames > 1 else ""),
            " x ".join(map(str, shape)),
            f"{family.num_tokens(shape):,}",
            f"{family.family_shift(shape):.3g}",
            _weights(release, trained),
            _terms(release),
            "; ".join(release.unconfirmed),
        )


def _count(number: int) -> str:
    """Such as 11.9 B or 44.8 M."""
    power, unit = (9, "B") if number >= 10**9 else (6, "M")
    digits = max(0, 2 - int(math.log10(number / 10**power)))
    return f"{number / 10**power:.{digits}f} {unit}"


def _weights(release: Release, trained: Mapping[str, int]) -> str:
    sizes = {name: _num_bytes(component, trained.get(name)) for name, component in release.components.items()}
    known = sum(size for size in sizes.values() if size is not None) / 1e9
    unknown = [name for name, size in sizes.items() if size is None]
    variants = f"; also {', '.join(release.variants)}" if release.variants else ""
    return f"{known:.1f} GB" + (f" without {', '.join(unknown)}" if unknown else "") + variants


def _num_bytes(component: ReleaseComponent, num_parameters: int | None) -> int | None:
    """Bytes of the weights; a model whose parameters are counted is not built again."""
    if component.num_bytes is not None:
        return component.num_bytes
    if num_parameters is None or component.dtype is None:
        return weight_bytes(component)
    return num_parameters * getattr(torch, component.dtype).itemsize


def _terms(release: Release) -> str:
    gated = ", gated" if release.gated else ""
    distilled = f"; distilled to {release.distilled}" if release.distilled else ""
    return f"{release.licence}{gated}{distilled}"
