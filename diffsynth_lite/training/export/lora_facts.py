"""This file gathers what the LoRA files of a run say about it, once, when its data are encoded."""

import hashlib
import json
from typing import Any

from diffsynth_lite import __version__
from diffsynth_lite.config import Config
from diffsynth_lite.data import TagCounts
from diffsynth_lite.lora.metadata import LoraFacts, SourceFacts
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.diffusion_family import DiffusionFamily
from diffsynth_lite.pipelines.base.release_folder import find_base_model
from diffsynth_lite.redaction import redacted
from diffsynth_lite.training.checkpoint.resume import RunFingerprint
from diffsynth_lite.training.data_settings import data_sources, learned_sources
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.layer_groups import adapter_kind, usual_size
from diffsynth_lite.training.optimization.optimizers import shown_arguments


def gather_lora_facts(
    config: Config, family: ModelFamily, encoded: TrainingData, fingerprint: RunFingerprint
) -> LoraFacts:
    """What is known of a run, with secrets masked; of settings the name, and those that change numbers."""
    data, squares = config.data, [(edge, edge) for edge in config.data.resolutions]
    return LoraFacts(
        version=__version__,
        name=redacted(config.logging.run_name),
        family=config.model.family.rpartition(".")[2],
        base=find_base_model(family.releases, config.model.path, family.folder),
        contract=hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest(),
        trigger_words=redacted(_trigger_words(config, encoded)),
        kind=adapter_kind(config).title,
        rank=config.lora.rank,
        alpha=usual_size(config).alpha,
        resolution=max(data.given_sizes or squares, key=lambda size: size[0] * size[1]),
        items_by_size=_items_by_size(encoded),
        sources=_sources(config, encoded),
        sigma_range=(config.objective.sigma_min, config.objective.sigma_max),
        prediction_type=_prediction_type(family),
        training=_training(config),
    )


def _trigger_words(config: Config, encoded: TrainingData) -> tuple[str, ...]:
    """Those of the config; where it has none, the tags that all items hold."""
    learned = [source for source in config.data.sources_by_key.values() if not source.preserve]
    given = [source.trigger for source in learned if source.trigger]
    if given:
        return tuple(dict.fromkeys(given))
    places, counts = learned_sources(config), encoded.tag_counts
    first, *others = (counts[place].in_all for place in counts if place in places)
    return tuple(tag for tag in first if all(tag in other for other in others))


def _items_by_size(encoded: TrainingData) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    for place, count in encoded.items.items_by_bucket.items():
        bucket = encoded.items.buckets[place]
        size = bucket.width, bucket.height
        counts[size] = counts.get(size, 0) + count
    return counts


def _sources(config: Config, encoded: TrainingData) -> dict[str, SourceFacts]:
    names, sources = config.data.sources_by_key, data_sources(config)
    counts = encoded.items.items_by_source
    return {
        name: SourceFacts(
            num_items=counts.get(place, 0),
            passes=float(source.passes),
            tag_counts=redacted(_tag_counts(encoded.tag_counts.get(place), source.trigger)),
            is_preserved=source.preserve,
        )
        for place, (name, source) in enumerate(zip(names, sources, strict=True))
    }


def _tag_counts(counted: TagCounts | None, trigger: str | None) -> dict[str, int]:
    """The most frequent first, and the trigger before what is as frequent: readers show the first few."""
    by_tag = counted.by_tag if counted else {}
    return dict(sorted(by_tag.items(), key=lambda entry: (-entry[1], entry[0] != trigger)))


def _prediction_type(family: ModelFamily) -> str | None:
    if not isinstance(family, DiffusionFamily):
        return None
    return "v" if family.prediction_type == "v_prediction" else str(family.prediction_type)


def _training(config: Config) -> dict[str, Any]:
    """Settings by the names that sd-scripts has for them."""
    train, data, objective = config.train, config.data, config.objective
    is_min_snr, is_static = objective.loss_weighting == "min_snr", objective.shift == "static"
    return {
        "seed": train.seed,
        "max_train_steps": train.steps,
        "total_batch_size": train.global_batch_size,
        "learning_rate": train.learning_rate,
        "lr_scheduler": train.lr_scheduler,
        "lr_warmup_steps": train.warmup_in_run,
        "optimizer": shown_arguments(config),
        "max_grad_norm": train.max_grad_norm,
        "mixed_precision": train.mixed_precision,
        "network_dropout": config.lora.dropout or None,
        "caption_dropout_rate": data.caption_dropout,
        "shuffle_caption": data.tag_shuffles > 0,
        "keep_tokens": data.keep_tags,
        "random_crop": data.crop == "random",
        "min_snr_gamma": objective.min_snr_gamma if is_min_snr else None,
        "discrete_flow_shift": objective.shift_value if is_static else None,
    }
