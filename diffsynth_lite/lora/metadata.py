"""This file makes the metadata of a LoRA file from facts about its run, under the names of other programs.

``modelspec.*`` is Stability AI's ModelSpec 1.0.1. ``ss_*`` is what kohya's sd-scripts writes, with values of
the form that they have there: Forge, Civitai, lora-inspector and managers for ComfyUI read them. The rest is
ours. Unknown facts are left out. There is no date: equal runs give equal files. As safetensors writes
metadata in a random order, the header is written again here, in the format of
https://github.com/huggingface/safetensors#format: 8 bytes with its length, json padded with spaces to whole
words of 8 bytes, and then the data.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffsynth_lite.files import replacing
from diffsynth_lite.releases import BaseModel

NoiseRange = tuple[float, float]
"""Noise levels from one to another, within [0, 1]."""

_ALL_NOISE: NoiseRange = (0.0, 1.0)
_TIMESTEPS = 1000
"""The scale of noise levels in the metadata."""


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One source of the training data.

    Attributes:
        num_items: items that were trained on; a crop or a clip of a file is an item.
        passes: times that each item occurs in a pass over the data.
        tag_counts: number of records of each of the most frequent tags, the most frequent first.
        is_preserved: whether its items are regularization images, which are not learned.
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
    """What a LoRA file, and the page next to it, state about the run that made it. No paths, no secrets.

    Attributes:
        name: the run's name; None where it has none.
        contract: hash of the settings, weights and data that decide the run's numbers, 64 hexadecimal digits.
        trigger_words: those of the config, or else the tags of all items.
        resolution: width and height in pixels of the largest configured size.
        items_by_size: width and height to the number of items.
        prediction_type: ``epsilon`` or ``v``; None of a model on the flow-matching path.
        training: how it was trained, by sd-scripts' names without ``ss_``; None is left out.
        of_family: what its family states in addition, by whole names.
        slider: neutral, positive and negative prompts of a slider; empty of other LoRAs.
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
    of_family: Mapping[str, str] = field(default_factory=dict)
    slider: tuple[tuple[str, str, str], ...] = ()

    @property
    def model_name(self) -> str:
        """Name of the base model: the release, or else the family."""
        return self.base.release.name if self.base.release else self.family

    @property
    def usage(self) -> str | None:
        """How a slider is used; None of other LoRAs."""
        if not self.slider:
            return None
        _, positive, negative = self.slider[0]
        return f"A slider, for strengths from -1 ({negative}) to 1 ({positive})."

    @property
    def title(self) -> str:
        """Title of the LoRA: the run's name, or else its first trigger word and its base model."""
        return self.name or ", ".join([*self.trigger_words[:1], f"{self.model_name} LoRA"])


def lora_metadata(
    facts: LoraFacts,
    *,
    step: int,
    is_average: bool = False,
    noise_range: NoiseRange = _ALL_NOISE,
    thumbnail: str | None = None,
) -> dict[str, str]:
    """The metadata of one file, without the hashes of its tensors.

    Args:
        noise_range: noise levels of the file's expert, for a model with one file per expert.
        thumbnail: a small image, as a data URL.
    """
    first, second = facts.sigma_range, noise_range
    noise = max(first[0], second[0]), min(first[1], second[1])
    groups: dict[str, Mapping[str, object]] = {
        "modelspec.": _modelspec(facts, step, noise, thumbnail),
        "ss_": _sd_scripts(facts, step),
        "diffsynth_lite.": _own(facts, step, is_average),
        "": facts.of_family,
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
    first, last = round(noise[0] * _TIMESTEPS), round(noise[1] * _TIMESTEPS) - 1
    return {
        "sai_model_spec": "1.0.1",
        "architecture": f"{facts.base.architecture or facts.family}/lora",
        "implementation": "diffusers",
        "title": facts.title,
        "description": " ".join(filter(None, [about, f"Trigger words: {words}." if words else facts.usage])),
        "license": f"{release.licence} (base model)" if release else None,
        "tags": ",".join(dict.fromkeys(["lora", facts.kind.lower(), facts.family])),
        "resolution": f"{width}x{height}",
        "trigger_phrase": words,
        "usage_hint": f"Trigger words: {words}" if words else facts.usage,
        "prediction_type": facts.prediction_type,
        "timestep_range": None if noise == _ALL_NOISE else f"{first},{last}",
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
        "slider": json.dumps(facts.slider, ensure_ascii=False) if facts.slider else None,
        "strengths": "-1 to 1" if facts.slider else None,
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
    """As an int if it is whole: other programs show it as it is written."""
    return int(value) if value == int(value) else value


_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def add_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    """Replace a file by one with more metadata, in the order of their names; its tensors stay as they are.

    Adds hashes of the tensors, ``modelspec.hash_sha256`` and ``sshs_model_hash``: the sha256 of all that
    follows the header, as ModelSpec and sd-scripts have it. And ``diffsynth_lite.dtype``.

    Args:
        metadata: replaces values of the same name in the file.
    """
    with file.open("rb") as source:
        header = json.loads(source.read(int.from_bytes(source.read(_LENGTH_BYTES), "little")))
        start = source.tell()
        digest = hashlib.sha256()
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
        extended = {
            **header.pop("__metadata__", {}),
            **metadata,
            "modelspec.hash_sha256": f"0x{digest.hexdigest()}",
            "sshs_model_hash": digest.hexdigest(),
            "diffsynth_lite.dtype": _dtype(header),
        }
        source.seek(start)
        with replacing(file) as temporary, temporary.open("wb") as target:
            target.write(_encoded({"__metadata__": dict(sorted(extended.items())), **header}))
            shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _encoded(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _dtype(header: Mapping[str, Any]) -> str:
    """The dtype of most bytes, which excludes the few numbers of the alphas."""
    num_bytes: Counter[str] = Counter()
    for entry in header.values():
        start, end = entry["data_offsets"]
        num_bytes[entry["dtype"]] += end - start
    stored = num_bytes.most_common(1)[0][0]
    return _DTYPES.get(stored, stored)
