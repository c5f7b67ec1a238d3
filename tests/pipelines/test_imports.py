"""A family's file is imported when that family is used, so that more families make no start slower."""

import re
import subprocess
import sys

import pytest

from diffsynth_lite.pipelines import family_names

FAMILIES = {f"diffsynth_lite.pipelines.{name}" for name in family_names()}


# Each line is run in turn; then the interpreter says what it holds.
STEPS = {
    "package": "import diffsynth_lite",
    "families": "import diffsynth_lite.pipelines as pipelines; pipelines.family_names()",
    "trainer": "import diffsynth_lite.cli.train, diffsynth_lite.training.run",
    "one family": "pipelines.load_family('qwen_image')",
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Names of the modules that a fresh interpreter holds after each of ``STEPS``."""
    code = "\n".join(["import sys", *(f"{line}\nprint(*sorted(sys.modules))" for line in STEPS.values())])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return {step: set(line.split()) for step, line in zip(STEPS, lines, strict=True)}


def diffusers_pipelines(modules: set[str]) -> list[str]:
    """Files of diffusers that define the pipelines of a model."""
    return sorted(name for name in modules if re.fullmatch(r"diffusers\.pipelines\.\w+\.pipeline_\w+", name))


@pytest.mark.parametrize("step", ["package", "families", "trainer"])
def test_nothing_imports_a_family_or_a_pipeline_of_diffusers_before_one_is_asked_for(
    loaded: dict[str, set[str]], step: str
) -> None:
    assert "diffsynth_lite" in loaded[step]
    assert loaded[step] & FAMILIES == set()
    assert diffusers_pipelines(loaded[step]) == []


def test_a_family_imports_itself_and_the_pipelines_it_names(loaded: dict[str, set[str]]) -> None:
    modules = loaded["one family"]
    assert modules & FAMILIES == {"diffsynth_lite.pipelines.qwen_image"}
    assert "diffusers.pipelines.qwenimage.pipeline_qwenimage" in modules
    assert not any("flux" in name for name in diffusers_pipelines(modules))
