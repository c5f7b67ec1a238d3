"""Families are found by their file's name, or by a dotted path."""

from pathlib import Path

import pytest

from diffsynth_lite import pipelines
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import family_names, load_family
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.qwen_image_edit import QwenImageEdit


def test_the_built_in_families_are_the_files_and_folders_beside_their_base() -> None:
    here = Path(pipelines.__path__[0])
    folders = {path.parent.name for path in here.glob("*/__init__.py")}
    files = {path.stem for path in here.glob("*.py")}
    assert family_names() == sorted((files | folders) - {"__init__", "base"})
    assert {"sdxl", "wan", "wan_i2v"} < set(family_names())
    assert load_family("qwen_image") is QwenImage
    assert load_family("qwen_image_edit") is QwenImageEdit


def test_a_family_kept_elsewhere_is_found_by_its_dotted_path() -> None:
    family = load_family("my_families.aura_flow")
    assert (family.__name__, family.__module__) == ("AuraFlow", "my_families.aura_flow")


def test_a_family_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "more_families" / "mine"
    package.mkdir(parents=True)
    (package / "family.py").write_text(
        "from diffsynth_lite.pipelines.qwen_image import QwenImage\nclass Mine(QwenImage): ...\n"
    )
    (package / "__init__.py").write_text("from more_families.mine.family import Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_family("more_families.mine").__name__ == "Mine"


def test_an_unknown_family_is_refused_with_the_close_one() -> None:
    with pytest.raises(UserError, match="did you mean 'qwen_image'"):
        load_family("qwen_imag")


@pytest.mark.parametrize("name", ["base", "no_such", "no.such.module", "diffsynth_lite.no_such"])
def test_an_unknown_family_names_the_ones_there_are(name: str) -> None:
    with pytest.raises(UserError, match=f"built-in families: {', '.join(family_names())}"):
        load_family(name)


def test_a_dotted_path_that_python_does_not_find_says_where_it_looks() -> None:
    with pytest.raises(UserError, match="install its package or name its folder in PYTHONPATH"):
        load_family("my_package.my_family")


def test_a_module_without_a_family_is_refused() -> None:
    with pytest.raises(UserError, match="defines 0 concrete subclasses"):
        load_family("json.decoder")


def test_a_missing_import_inside_a_familys_file_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken_families"
    package.mkdir()
    (package / "broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_family("broken_families.broken")
