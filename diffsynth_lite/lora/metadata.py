"""This file makes the metadata of a LoRA file out of facts about its run, by the names that others look for.

``modelspec.*`` is Stability AI's ModelSpec 1.0.1. ``ss_*`` is what kohya's sd-scripts writes, with values of
the form that they have there: Forge, Civitai, lora-inspector and managers for ComfyUI read them. The rest is
ours. What is not known is left out. There is no date: equal runs give equal files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from diffsynth_lite.releases import BaseModel

NoiseRange = tuple[float, float]
"""Noise levels from one to another, within [0, 1]."""

_ALL_NOISE: NoiseRange = (0.0, 1.0)
_TIMESTEPS = 1000
"""That noise levels are told in."""


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One source of the training data.

    Attributes:
        num_items: that were trained on; a crop or a clip of a file is an item.
        passes: how often each occurs in a pass over the data.
        tag_counts: for the most frequent tags, the records that hold them, the most frequent first.
        is_preserved: whether it is not learned; sd-scripts calls such pictures regularization images.
    """

    num_items: int
    passes: float
    tag_counts: Mapping[str, int]
    is_preserved: bool = False

    @property
    def num_seen(self) -> float:
        """Items of a pass over the data."""
        return self.num_items * self.passes


@dataclass(frozen=True, kw_only=True)
class LoraFacts:
    """What a LoRA file, and the page beside it, say of the run that made it. No paths, and no secrets.

    Attributes:
        version: of this package.
        name: what the user calls the run; None where it has no name.
        family: name of the model family.
        base: what it was trained on.
        contract: hash of the settings, weights and data that decide the run's numbers, 64 hexadecimal digits.
        trigger_words: as the config has them, or else the tags that all items hold.
        kind: of the adapter, as people call it.
        rank: of the adapter.
        alpha: that it was trained with.
        resolution: width and height in pixels, of the largest size that was asked for.
        items_by_size: how many items have each width and height.
        sources: of the data, by their place in the config.
        sigma_range: the noise levels that were trained on.
        prediction_type: ``epsilon`` or ``v``; None of a model on the flow-matching path.
        training: how it was trained, by sd-scripts' names without ``ss_``; None is left out.
    """

    version: str
    name: str | None
    family: str
    base: BaseModel
    contract: str
    trigger_words: tuple[str, ...]
    rank: int
    alpha: float
    resolution: tuple[int, int]
    items_by_size: Mapping[tuple[int, int], int]
    sources: Mapping[str, SourceFacts]
    sigma_range: NoiseRange = _ALL_NOISE
    prediction_type: str | None = None
    training: Mapping[str, str | float | None]
    kind: str = "LoRA"

    @property
    def model_name(self) -> str:
        """What the base model is called: the release, or else the family."""
        return self.base.release.name if self.base.release else self.family

    @property
    def title(self) -> str:
        """What the LoRA is called: the run's name, or else its first trigger word and its base model."""
        return self.name or ", ".join([*self.trigger_words[:1], f"{self.model_name} LoRA"])


def lora_metadata(
    facts: LoraFacts,
    *,
    step: int,
    is_average: bool = False,
    noise_range: NoiseRange = _ALL_NOISE,
    thumbnail: str | None = None,
) -> dict[str, str]:
    """The metadata of one file, but for what is told of its tensors.

    Args:
        facts: of the run.
        step: optimizer steps that the weights have had.
        is_average: whether they are the moving average.
        noise_range: that the file is for, where a model has experts with a file each.
        thumbnail: a small picture, as a data URL.
    """
    noise = _shared(facts.sigma_range, noise_range)
    groups: dict[str, Mapping[str, object]] = {
        "modelspec.": _modelspec(facts, step, noise, thumbnail),
        "ss_": _sd_scripts(facts, step),
        "diffsynth_lite.": _own(facts, step, is_average),
    }
    return {
        f"{group}{name}": str(value)
        for group, values in groups.items()
        for name, value in values.items()
        if value is not None
    }


def _modelspec(
    facts: LoraFacts, step: int, noise: NoiseRange, thumbnail: str | None
) -> dict[str, str | None]:
    words = ", ".join(facts.trigger_words) or None
    release = facts.base.release
    about = f"{facts.kind} of rank {facts.rank} for {facts.model_name}, after {step} steps."
    width, height = facts.resolution
    return {
        "sai_model_spec": "1.0.1",
        "architecture": f"{facts.base.architecture or facts.family}/lora",
        "implementation": "diffusers",
        "title": facts.title,
        "description": f"{about} Trigger words: {words}." if words else about,
        "license": f"{release.licence} (base model)" if release else None,
        "tags": ",".join(dict.fromkeys(["lora", facts.kind.lower(), facts.family])),
        "resolution": f"{width}x{height}",
        "trigger_phrase": words,
        "usage_hint": f"Trigger words: {words}" if words else None,
        "prediction_type": facts.prediction_type,
        "timestep_range": None if noise == _ALL_NOISE else ",".join(map(str, _timesteps(noise))),
        "thumbnail": thumbnail,
    }


def _own(facts: LoraFacts, step: int, is_average: bool) -> dict[str, object]:
    return {
        "version": facts.version,
        "family": facts.family,
        "kind": None if facts.kind == "LoRA" else facts.kind,
        "base_model": facts.base.hub_id,
        "base_model_revision": facts.base.revision,
        "contract": facts.contract,
        "step": step,
        "weights": "average" if is_average else "trained",
    }


def _sd_scripts(facts: LoraFacts, step: int) -> dict[str, object]:
    learned, preserved = (
        {name: source for name, source in facts.sources.items() if source.is_preserved is is_preserved}
        for is_preserved in (False, True)
    )
    tags = {name: source.tag_counts for name, source in learned.items() if source.tag_counts}
    buckets = {
        str(place): {"resolution": size, "count": count}
        for place, (size, count) in enumerate(sorted(facts.items_by_size.items()))
    }
    num_seen = round(sum(source.num_seen for source in learned.values()))
    num_preserved = round(sum(source.num_seen for source in preserved.values()))
    return {
        "base_model_version": facts.base.version,
        "sd_model_name": facts.base.hub_id,
        "output_name": facts.name,
        "network_module": "networks.lora" if facts.kind == "LoRA" else None,
        "network_dim": facts.rank,
        "network_alpha": _number(facts.alpha),
        "resolution": facts.resolution,
        "bucket_info": json.dumps({"buckets": buckets}),
        "num_train_images": num_seen,
        "num_train_items": num_seen,
        "num_reg_images": num_preserved if preserved else None,
        "dataset_dirs": json.dumps(_folders(learned)),
        "reg_dataset_dirs": json.dumps(_folders(preserved)) if preserved else None,
        "tag_frequency": json.dumps(tags, ensure_ascii=False) if tags else None,
        "steps": step,
        **facts.training,
    }


def _folders(sources: Mapping[str, SourceFacts]) -> dict[str, dict[str, float]]:
    return {
        name: {"n_repeats": _number(source.passes), "img_count": source.num_items}
        for name, source in sources.items()
    }


def _number(value: float) -> float:
    """As an int where it is one: others show it as it is written."""
    return int(value) if value == int(value) else value


def _shared(first: NoiseRange, second: NoiseRange) -> NoiseRange:
    return max(first[0], second[0]), min(first[1], second[1])


def _timesteps(noise: NoiseRange) -> tuple[int, int]:
    """The first and the last of 1000 timesteps."""
    low, high = noise
    return round(low * _TIMESTEPS), round(high * _TIMESTEPS) - 1
