"""Links in the documents lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml

from diffsynth_lite.pipelines import ModelFamily, load_family
from diffsynth_lite.releases.families import family_names

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
OF_BASE_CLASSES = {
    *("check_size", "check_frames", "check_prompt", "check_vae_dtype", "empty_component"),
    *("noise_path", "noise_ranges"),
    *("denoisers", "edits", "parts_of", "take_files", "text_encoders"),
    *("known_vae_tiles", "tile_vae", "min_inference_steps", "has_guidance", "takes_guidance", "learn_as"),
}
"""Members of families that have a default, which a family itself need not know."""
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


def test_the_public_ci_runs_the_commands_of_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    (workflow,) = (REPOSITORY / ".github" / "workflows").iterdir()
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = {f"bash {script}" for run in runs for script in re.findall(r"bash (\S+)", run)}
    assert named == {"bash scripts/test.sh", "bash scripts/quickstart.sh"}
    assert all(command in readme for command in named)


def test_the_page_about_families_names_all_that_has_a_default_with_families_that_give_it() -> None:
    text = (REPOSITORY / "docs" / "add-a-model.md").read_text()
    _, _, section = text.partition("### What has a default")
    given: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*)", section.partition("### ")[0], re.M):
        members, _, families = row.strip(" |").split(" | ")
        for member in re.findall(r"`(\w+)`", members):
            given[member] = set(re.findall(r"`(\w+)`", families))
    inherited = {
        name
        for name, value in vars(ModelFamily).items()
        if not name.startswith("_") and not getattr(value, "__isabstractmethod__", False)
    }
    assert inherited - given.keys() == OF_BASE_CLASSES, "a row for a new member says when it is needed"
    for member, families in given.items():
        assert any(gives(load_family(name), member) for name in families), member


def gives(family: type[ModelFamily], member: str) -> bool:
    """Whether it says this itself, and no base class that families share."""
    return any(member in vars(cls) for cls in family.__mro__ if "pipelines.base." not in cls.__module__)


def test_the_page_about_lora_files_has_the_names_of_each_family() -> None:
    text = (REPOSITORY / "docs" / "lora-file.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text.partition("| family |")[2].partition("\n\n")[0], re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == family_names()
