"""Links in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(document: Path) -> None:
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert missing == []


def test_the_readme_has_links_to_check() -> None:
    assert "docs/images/quickstart.png" in LINK.findall((REPOSITORY / "README.md").read_text())


def test_the_quickstart_names_files_that_the_scripts_write() -> None:
    script = (REPOSITORY / "scripts" / "quickstart.sh").read_text()
    score = (REPOSITORY / "examples" / "quickstart" / "score.py").read_text()
    assert "$run/score/grid.png" in script
    assert '"grid.png"' in score
