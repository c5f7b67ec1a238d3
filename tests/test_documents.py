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
    links = LINK.findall((REPOSITORY / "README.md").read_text())
    assert {"docs/images/quickstart.png", "docs/images/video_quickstart.png"} <= set(links)


@pytest.mark.parametrize(
    ("script", "score"), [("quickstart.sh", "score.py"), ("video_quickstart.sh", "score_clips.py")]
)
def test_a_quickstart_names_files_that_its_scripts_write(script: str, score: str) -> None:
    assert f" {score} " in (REPOSITORY / "scripts" / script).read_text()
    assert "$run/score/grid.png" in (REPOSITORY / "scripts" / "run_example.sh").read_text()
    assert '"grid.png"' in (REPOSITORY / "examples" / "quickstart" / score).read_text()


def test_the_readme_names_scripts_that_are_there() -> None:
    named = re.findall(r"bash (scripts/\S+\.sh)", (REPOSITORY / "README.md").read_text())
    assert "scripts/video_quickstart.sh" in named
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []
