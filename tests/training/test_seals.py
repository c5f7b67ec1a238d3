"""Which settings the items of a sealed cache depend on."""

from typing import Any

from diffsynth_lite.config import load_config
from diffsynth_lite.training.encoding.seals import seal_settings


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
