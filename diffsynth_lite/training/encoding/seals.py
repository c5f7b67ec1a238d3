"""This file collects the settings that a sealed cache depends on, and compares those of a run with it."""

from typing import Any

from diffsynth_lite.config import Config, DataSettings, SourceSettings
from diffsynth_lite.data.sealed.entries import SealFolder
from diffsynth_lite.data.sealed.seal import Seal, open_seal
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.redaction import redacted

_FREE_OF_DATA = frozenset(
    [
        *("sources", "caption_dropout", "cache", "cache_dir", "sealed"),
        *("on_bad_item", "max_bad_ratio", "num_workers", "silent_clips"),
    ]
)
"""Settings of ``data`` that change no item, or are compared in another way."""
_FREE_OF_SOURCES = frozenset(["repeats", "weight", "loss_weight", "preserve"])
"""Settings of how often and for what an item is used."""
_OF_THE_MODEL = ("family", "text_encoder_dtype", "text_encoder_quantize", "vae_dtype", "vae_tiling")
_DROPS_CAPTIONS = "data.caption_dropout above 0"
_GUIDES_TARGETS = "objective.guidance_target above 1"
_ASK_FOR_MORE = (_DROPS_CAPTIONS, _GUIDES_TARGETS)
"""A seal that was made with one of these also serves a run without it."""


def seal_settings(config: Config) -> dict[str, Any]:
    """The settings that the items of a run depend on, by dotted key, with secrets masked.

    The data's paths count: a seal is not valid for another folder.
    """
    data, validation = config.data, config.validation
    values = data.model_dump(mode="json", exclude={*_FREE_OF_DATA, *SourceSettings.model_fields})
    settings = {f"data.{name}": value for name, value in values.items()}
    for key, source in data.sources_by_key.items():
        own = source.model_dump(mode="json", exclude=set(_FREE_OF_SOURCES))
        settings |= {f"{key}.{name}": value for name, value in own.items()}
    model = config.model.model_dump(mode="json", include=set(_OF_THE_MODEL))
    settings |= {f"model.{name}": value for name, value in model.items()}
    settings[_DROPS_CAPTIONS] = data.caption_dropout > 0
    if config.objective.guidance_target is not None:  # else as in older seals
        settings[_GUIDES_TARGETS] = True
    settings["validation.data"] = validation.data
    if config.holds_out:
        settings["validation.loss_items"] = validation.loss_items
    if data.hold_out > 0:
        settings["validation.seed"] = validation.seed
    first = next(iter(data.sources_by_key))
    if validation.data is not None and data.held_out_key != first:  # else as in older seals
        settings["the source of validation.data"] = data.held_out_key
    return redacted(settings)


def unsealed(config: Config) -> Config:
    """The config for a run from the media and the cache."""
    return config.model_copy(update={"data": config.data.model_copy(update={"sealed": None})})


def open_config_seal(config: Config) -> Seal | None:
    """The seal that a config names, or None where none is there."""
    assert config.data.sealed is not None
    seal = open_seal(SealFolder(config.data.sealed))
    if seal is not None:
        _require_same_settings(seal, seal_settings(config))
    return seal


def require_seal(config: Config) -> Seal:
    """The seal that a run trains from."""
    seal = open_config_seal(config)
    if seal is None:
        raise UserError(
            f"data.sealed: {config.data.sealed} holds no sealed cache; `diffsynth-lite cache seal` with this "
            "config writes it, or remove the setting to train from the cache as it is"
        )
    return seal


def _require_same_settings(seal: Seal, settings: dict[str, Any]) -> None:
    # A seal from before a setting existed counts as made with its default.
    defaults = DataSettings.defaults()
    sealed = {key: defaults.get(key.rpartition(".")[2]) for key in settings} | seal.document.settings
    differing = [
        f"{key} was {sealed.get(key)!r}, is {settings.get(key)!r}"
        for key in dict.fromkeys([*settings, *sealed])
        if sealed.get(key) != settings.get(key) and not (key in _ASK_FOR_MORE and sealed.get(key))
    ]
    if differing:
        raise UserError(
            f"data.sealed: {seal.folder} was sealed with other settings: {join_names(differing)}; restore "
            "them, or name another folder and seal again"
        )
