"""A family's file is imported when that family is used, so that more families make no start slower."""

import re
import subprocess
import sys

import pytest

from diffsynth_lite.pipelines import family_names

FAMILIES = {f"diffsynth_lite.pipelines.{name}" for name in family_names()}


def loaded_by(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after ``code``."""
    code = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def diffusers_pipelines(modules: set[str]) -> list[str]:
    """Files of diffusers that define the pipelines of a model."""
    return sorted(name for name in modules if re.fullmatch(r"diffusers\.pipelines\.\w+\.pipeline_\w+", name))


@pytest.mark.parametrize(
    "code",
    [
        "import diffsynth_lite",
        "import diffsynth_lite.pipelines as pipelines\npipelines.family_names()",
        "import diffsynth_lite.cli.train, diffsynth_lite.training.run",
    ],
    ids=["package", "families", "trainer"],
)
def test_nothing_imports_a_family_or_a_pipeline_of_diffusers_before_one_is_asked_for(code: str) -> None:
    modules = loaded_by(code)
    assert "diffsynth_lite" in modules
    assert modules & FAMILIES == set()
    assert diffusers_pipelines(modules) == []


def test_a_family_imports_itself_and_the_pipelines_it_names() -> None:
    modules = loaded_by("from diffsynth_lite.pipelines import load_family\nload_family('qwen_image')")
    assert modules & FAMILIES == {"diffsynth_lite.pipelines.qwen_image"}
    assert "diffusers.pipelines.qwenimage.pipeline_qwenimage" in modules
    assert not any("flux" in name for name in diffusers_pipelines(modules))
