"""Which settings the items of a sealed cache depend on."""

from types import SimpleNamespace
from typing import Any

import pytest

from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.encoding.seals import _require_same_settings, seal_settings


def of_sources(*sources: str, held_out: str = "held_out") -> dict[str, Any]:
    given = ", ".join(f"{{path: {source}}}" for source in sources)
    overrides = ("data.path=null", f"data.sources=[{given}]", f"validation.data={held_out}")
    return seal_settings(load_config("quickstart.yaml", overrides).config)


def test_what_is_preserved_counts_only_where_held_out_items_are_then_read_as_another_source() -> None:
    both = of_sources("a, trigger: x", "b")
    assert of_sources("a, trigger: x", "b, preserve: true, loss_weight: 2") == both
    other = of_sources("a, trigger: x, preserve: true", "b")
    assert other == both | {"the source of validation.data": "data.sources[1]"}
    alone = of_sources("a, trigger: x", "b", held_out="null")
    assert of_sources("a, trigger: x, preserve: true", "b", held_out="null") == alone


def test_a_seal_from_before_there_was_a_setting_was_made_with_its_default() -> None:
    settings = of_sources("a", "b")
    added = ("data.audio", "data.sources[1].mask_column")
    older: Any = SimpleNamespace(settings={key: settings[key] for key in settings if key not in added})
    seal: Any = SimpleNamespace(folder="sealed", document=older)
    _require_same_settings(seal, settings)
    for key, value in zip(added, (True, "mask"), strict=True):
        with pytest.raises(UserError, match="was sealed with other settings"):
            _require_same_settings(seal, settings | {key: value})
