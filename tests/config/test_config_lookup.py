"""A config is found by its path, or by its bare name among the recipes of this package."""

from pathlib import Path

import pytest

from diffsynth_lite.config import files, find_config_file, load_config
from diffsynth_lite.errors import UserError

RECIPES = Path(__file__).parents[2] / "configs"


def test_a_path_is_taken_as_given(write, minimal):
    path = write(minimal)
    assert find_config_file(str(path)) == path


def test_a_bare_name_is_found_in_the_working_folder_first(tmp_path, monkeypatch, minimal):
    monkeypatch.chdir(tmp_path)
    assert find_config_file("quickstart.yaml") == RECIPES / "quickstart.yaml"
    Path("quickstart.yaml").write_text(minimal)
    assert find_config_file("quickstart.yaml") == Path("quickstart.yaml")
    assert load_config("quickstart.yaml").config.model.path == "some/model"


def test_a_missing_name_says_where_it_was_looked_for_and_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine_lora.yml").touch()
    for name, hint in (
        ("qwen-lora.yaml", "did you mean 'qwen_lora.yaml'?"),
        ("mine_lora.yaml", "did you mean 'mine_lora.yml'?"),
        ("cat.yaml", f"The recipes: {', '.join(sorted(path.name for path in RECIPES.glob('*.yaml')))}"),
    ):
        with pytest.raises(UserError) as caught:
            find_config_file(name)
        where, _, told = str(caught.value).partition("; ")
        assert where == f"--config {name}: not found in {tmp_path} nor in {RECIPES}"
        assert told.endswith(hint)
        assert "\n" not in told


def test_an_installed_package_has_its_recipes_inside(tmp_path, monkeypatch):
    for folder in ("diffsynth_lite/configs", "configs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "installed.yaml").touch()
    monkeypatch.setattr(files, "__file__", str(tmp_path / "diffsynth_lite" / "config" / "files.py"))
    assert find_config_file("installed.yaml") == tmp_path / "diffsynth_lite" / "configs" / "installed.yaml"


def test_a_missing_path_is_not_looked_for_among_the_recipes(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        find_config_file(tmp_path / "qwen_lora.yaml")


def test_a_name_that_no_file_can_have_says_so():
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        find_config_file("x" * 300)


def test_a_folder_is_not_a_config(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        find_config_file(tmp_path)
