"""docs/configuration.md says what the code says."""

from pathlib import Path

import pytest

from diffsynth_lite.config.field_type import field_types
from diffsynth_lite.config.reference import descriptions, render_reference
from diffsynth_lite.config.schema import section_types

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_the_one_that_is_generated():
    assert PAGE.read_text(encoding="utf-8") == render_reference(), "run scripts/generate_docs.py"


@pytest.mark.parametrize(("name", "section"), section_types().items())
def test_every_setting_is_described_and_on_the_page(name, section):
    texts = descriptions(section)
    assert list(texts) == list(field_types(section))
    page_of_section = PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    for key, text in texts.items():
        assert text.endswith(".")
        assert "|" not in text, "would break the table"
        assert f"\n| `{key}` | " in page_of_section


def test_no_setting_holds_a_secret():
    names = [key for section in section_types().values() for key in field_types(section)]
    assert not [
        name for name in names if any(word in name for word in ("token", "secret", "password", "api_key"))
    ]
