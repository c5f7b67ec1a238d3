"""docs/configuration.md says what the code says."""

from pathlib import Path

import pytest

from diffsynth_lite.config import SourceSettings
from diffsynth_lite.config.reference import render_reference
from diffsynth_lite.config.schema import section_types

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_the_one_that_is_generated():
    assert PAGE.read_text(encoding="utf-8") == render_reference(), "run scripts/generate_docs.py"


def page_of(heading: str) -> str:
    """The page from a heading to the next one of its level."""
    level = heading.split(" ")[0]
    return PAGE.read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split(f"\n{level} ")[0]


@pytest.mark.parametrize(("name", "section"), section_types().items())
def test_every_setting_is_described_and_on_the_page(name, section):
    for key, setting in section.model_fields.items():
        assert setting.description.endswith(".")
        assert "|" not in setting.description, "would break the table"
        assert page_of(f"## {name}").count(f"\n| `{key}` | ") == 1


def test_the_settings_of_a_source_have_a_table_of_their_own():
    table = page_of("### data.sources").split("\n## ")[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert rows == list(SourceSettings.model_fields)


def test_no_setting_holds_a_secret():
    words = {
        word
        for section in section_types().values()
        for key in section.model_fields
        for word in key.split("_")
    }
    assert words & {"token", "secret", "password", "key"} == set()
