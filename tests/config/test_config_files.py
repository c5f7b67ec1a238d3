"""Which files a config is made of: found by path or name, extending others, with presets on top."""

import logging
from pathlib import Path

import pytest
import yaml

from diffsynth_lite.config import ConfigError, find_config_file, load_config
from diffsynth_lite.config import files as config_files
from diffsynth_lite.config.files import if_in_clone, read_config_files, read_preset
from diffsynth_lite.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(path.stem for path in (CONFIGS / "presets").glob("*.yaml"))
RECIPES = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("cards/*.yaml")])


def test_a_path_is_taken_as_given(write, minimal):
    path = write(minimal)
    assert find_config_file(str(path)) == path


def test_a_bare_name_is_found_in_the_working_folder_first(tmp_path, monkeypatch, minimal):
    monkeypatch.chdir(tmp_path)
    assert find_config_file("quickstart.yaml") == CONFIGS / "quickstart.yaml"
    Path("quickstart.yaml").write_text(minimal)
    assert find_config_file("quickstart.yaml") == Path("quickstart.yaml")
    assert load_config("quickstart.yaml").config.model.path == "some/model"


def test_the_error_about_a_missing_name_has_where_it_was_looked_for_and_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine_lora.yml").touch()
    for name, hint in (
        ("qwen-lora.yaml", "did you mean 'qwen_lora.yaml'?"),
        ("mine_lora.yaml", "did you mean 'mine_lora.yml'?"),
        ("my_lora.yaml", "`diffsynth-lite init FOLDER` writes a config for the images or clips in a folder"),
    ):
        with pytest.raises(UserError) as caught:
            find_config_file(name)
        where, _, line = str(caught.value).partition("; ")
        assert where == f"--config {name}: not found in {tmp_path} nor in {CONFIGS}"
        assert line.endswith(hint)
        assert "\n" not in line


def test_an_installed_package_has_its_recipes_inside_and_names_no_page_of_the_docs(tmp_path, monkeypatch):
    assert if_in_clone("docs/memory.md", "see it") == "see it"
    for folder in ("diffsynth_lite/configs", "configs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "installed.yaml").touch()
    monkeypatch.setattr(config_files, "__file__", str(tmp_path / "diffsynth_lite" / "config" / "files.py"))
    assert find_config_file("installed.yaml") == tmp_path / "diffsynth_lite" / "configs" / "installed.yaml"
    assert if_in_clone("docs/memory.md", "see it") == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("{}/qwen_lora.yaml", "there is no such file"),  # a path is not looked for among the recipes
        ("x" * 300, "has at most 255 bytes"),
        ("C:\\my files\\x.yaml", "in WSL it is /mnt/c/my files/x.yaml"),
        ("{}", "is a folder"),
    ],
)
def test_a_path_without_a_file_is_refused(tmp_path, name, reason):
    with pytest.raises(UserError, match=reason):
        find_config_file(name.format(tmp_path))


@pytest.fixture
def files(tmp_path, minimal):
    """Writes files of a folder by name, next to ``base.yaml``, and gives the path of the last."""

    def write_files(**texts: str) -> Path:
        for name, text in {"base": f"{minimal}train:\n  steps: 7\n  seed: 3\n", **texts}.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / f"{name}.yaml"

    return write_files


def test_the_settings_of_both_hold_and_those_of_the_first_win(files, tmp_path):
    path = files(
        middle="extends: base.yaml\ntrain:\n  steps: 8\nlogging:\n  project: ${output.dir}\n",
        top="train: {warmup_steps: 2}\ndata: {resolutions: [64]}\nextends: middle.yaml\n",
    )
    loaded = load_config(path, ["train.seed=4"])
    train = loaded.config.train
    assert (train.steps, train.seed, train.warmup_steps) == (8, 4, 2)
    assert (loaded.config.model.path, loaded.config.data.path) == ("some/model", "images")
    assert loaded.config.data.resolutions == [64]
    assert loaded.config.logging.project == "runs/one"
    # The copy in the run folder needs none of them, and leaves out the command line.
    names = "top.yaml, which extends middle.yaml, which extends base.yaml"
    assert loaded.source_text.startswith(f"# The settings of {names}.\n")
    assert "project: ${output.dir}" in loaded.source_text
    copy = tmp_path / "copy.yaml"
    copy.write_text(loaded.source_text)
    assert load_config(copy, ["train.seed=4"]).config == loaded.config
    assert load_config(copy).config.train.seed == 3


def test_a_recipe_is_found_wherever_the_file_is(files):
    config = load_config(files(mine="extends: qwen_lora.yaml\noutput: {dir: runs/mine}\n")).config
    recipe = load_config(find_config_file("qwen_lora.yaml")).config
    output = recipe.output.model_copy(update={"dir": "runs/mine"})
    assert config == recipe.model_copy(update={"output": output})


def test_each_problem_is_at_its_line_of_its_file(refusal, files, tmp_path):
    path = files(
        wrong="train:\n  steps: many\n  sed: 1\nlora:\n  rank: 0\n",
        top="extends: wrong.yaml\n\nlora:\n  rank: 4\n  alpha: x\n",
    )
    wrong = tmp_path / "wrong.yaml"
    assert [line.split(": ")[0] for line in refusal(path)] == [
        f"{wrong}:2 train.steps",
        f"{wrong}:3 train.sed",
        # Though another takes its place.
        f"{wrong}:5 lora.rank",
        f"{path}:5 lora.alpha",
        *(f"{path}:1 {name}" for name in ("model.family", "model.path", "output.dir", "data.path")),
    ]


def test_a_text_that_no_file_has_is_loaded_as_if_its_file_had_it(files, tmp_path):
    files(base="model:\n  family: qwen_image\ntrain:\n  steps: 0\n")
    path, text = tmp_path / "draft.yaml", "extends: base.yaml\ntrain:\n  steps: 5\n"
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["train.seed=x"], text=f"{text}  sed: 1\n")
    found = [(each.file and each.file.name, each.line, each.key) for each in caught.value.problems]
    expected = [("base.yaml", 4, "train.steps"), ("draft.yaml", 4, "train.sed"), (None, 0, "train.seed")]
    # What is missing is placed at its section, where there is one.
    missing = [("draft.yaml", 1, "output.dir"), ("draft.yaml", 1, "data.path")]
    assert found == [*expected, ("base.yaml", 1, "model.path"), *missing]
    assert str(caught.value) == "\n".join(f"{each.place}: {each.text}" for each in caught.value.problems)
    assert caught.value.problems[1].text == "unknown key; did you mean 'seed'?"
    # A draft that cannot be read at all has its line, too.
    with pytest.raises(ConfigError) as caught:
        load_config(path, text=f"{text}  seed: [1\n")
    assert [(each.line, each.key) for each in caught.value.problems] == [(5, "")]
    files(base="model:\n  family: qwen_image\n  path: some/model\n")
    loaded = load_config(path, text=f"{text}data:\n  path: images\noutput:\n  dir: runs/one\n")
    assert (loaded.path, loaded.config.train.steps, loaded.config.model.path) == (path, 5, "some/model")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("extends: bass.yaml", "bass.yaml: not found in"),
        ("extends: qwen_loro.yaml", "did you mean 'qwen_lora.yaml'?"),
        ("extends: other/base.yaml", "there is no file"),
        ("extends: [base.yaml]", "got ['base.yaml']; must be the name of one"),
        ("extends:", "must be the name of one yaml file"),
        ("extends: base.yaml\nextends: base.yaml", "is there already, on line 2"),
        ("extends: top.yaml", "a file cannot extend itself: top.yaml -> top.yaml"),
        ("extends: back.yaml", "a file cannot extend itself: top.yaml -> back.yaml -> top.yaml"),
        (f"extends: {'x' * 5000}", f"'{'x' * 60}...' cannot be looked for: File name too long"),
        (f"extends: {'x/' * 5000}", "cannot be looked for: File name too long"),
    ],
)
def test_a_file_that_cannot_be_extended_is_refused_at_the_line_that_names_it(refusal, files, line, reason):
    path = files(back="extends: top.yaml\n", top=f"# one\n{line}\n")
    (line,) = refusal(path)
    place, _, message = line.partition(" extends: ")
    number = 3 if "already" in reason else 2
    assert place == (f"{path}:{number}" if "back" not in line else f"{path.parent / 'back.yaml'}:1")
    assert reason in message


@pytest.mark.parametrize(
    "text",
    [
        "swordfish: 1\n",
        "# nothing\n",
        "key: &swordfish 1\n",
        "key: !swordfish 1\n",
        "swordfish\n",
        "[swordfish, {train: 1}]\n",
        "a: %TAG\nb: [swordfish\n",
        "\n" * 500_000 + "swordfish",  # looked at line by line: minutes, if line breaks were tried together
    ],
    ids=lambda text: text[:20],
)
def test_of_a_file_that_is_no_config_nothing_is_shown(refusal, files, text):
    path = files(other=text, top="extends: other.yaml\n")
    (line,) = refusal(path)
    other = path.parent / "other.yaml"
    assert line == (f"{other}:1: is not a config: no line of it begins a section, such as 'train:'")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("train: {step: 1}\nlorra: {}\n", "did you mean"),
        ('{"train": {"step": 1}}\n', "did you mean"),
        ("train:\n  steps: &a 1\n", "'a' is a yaml anchor"),
    ],
)
def test_of_a_config_with_a_wrong_key_the_key_is_shown(files, text, reason):
    with pytest.raises(UserError, match=reason):
        load_config(files(other=text, top="extends: other.yaml\n"))


@pytest.mark.parametrize(
    ("line", "override", "reason"),
    [
        ("extend: base.yaml", "train.seed=1", "did you mean 'extends'?"),
        ("extends: base.yaml", "extends=other.yaml", "is for files; name a file that has it"),
    ],
)
def test_the_key_is_suggested_in_a_file_and_not_on_the_command_line(refusal, files, line, override, reason):
    assert reason in " ".join(refusal(files(top=f"{line}\n"), [override]))


def test_the_presets_are_these():
    assert PRESETS == ["few_pictures", "likeness", "motion", "style"]
    for name in PRESETS:
        settings = yaml.safe_load(read_preset(name).text)
        settings.pop("families", None)
        assert sum(map(len, settings.values())) <= 5
        assert "data" not in settings or "path" not in settings["data"]


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if path.stem != "slider"], ids=lambda path: path.stem
)
def test_a_recipe_takes_all_presets_that_are_for_its_family(path):
    family = _family(path)
    fitting = [name for name in PRESETS if family in (read_preset(name).families or [family])]
    loaded = load_config(path, presets=fitting)
    assert (loaded.config.model.family, loaded.warnings) == (family, ())
    # As each setting was given last.
    expected = {}
    for name in fitting:
        settings = yaml.safe_load(read_preset(name).text)
        settings.pop("families", None)
        expected |= {(section, key): value for section, own in settings.items() for key, value in own.items()}
    if "quickstart" not in path.stem:  # A recipe for a card still fits it.
        assert loaded.config.lora.rank <= load_config(path).config.lora.rank
        assert loaded.config.train.ema_decay is None
    given = {(section, key): getattr(getattr(loaded.config, section), key) for section, key in expected}
    assert given == expected


def _lines(path):
    """Those of a recipe and of the ones that it extends."""
    return [line for file in read_config_files(path) for line in file.text.splitlines()]


def _family(path):
    return load_config(path).config.model.family


def test_presets_for_clips_are_refused_for_models_of_images(refusal):
    (line,) = refusal("qwen_24gb.yaml", presets=["style", "motion"])
    families = ", ".join(read_preset("motion").families)
    assert line == (f"--preset motion: is for {families}, and model.family is qwen_image; leave it out")
    of_clips = {_family(path) for path in RECIPES if any("  frame_counts:" in line for line in _lines(path))}
    assert set(read_preset("motion").families) == of_clips


def test_a_preset_wins_over_the_file_and_the_command_line_over_it(write, minimal, tmp_path, caplog):
    path = write(
        f"{minimal}lora:\n  rank: 4\ntrain:\n  steps: 7\n  seed: 3\nvalidation: {{prompts: [a cat]}}\n"
    )
    with caplog.at_level(logging.INFO, "diffsynth_lite"):
        loaded = load_config(path, ["train.steps=9"], presets=["likeness", "few_pictures"])
    train, lora = loaded.config.train, loaded.config.lora
    assert (train.steps, train.seed, lora.rank, lora.dropout) == (9, 3, 8, 0.1)
    assert caplog.messages == [
        "--preset likeness: lora.rank 16 (was 4), train.steps 1000 (the command line wins: 9), "
        "validation.every_steps 100, output.checkpoint_every_steps 100",
        "--preset few_pictures: lora.rank 8 (was 16), lora.dropout 0.1, "
        "train.steps 500 (the command line wins: 9), "
        "validation.every_steps 50 (was 100), output.checkpoint_every_steps 50 (was 100)",
    ]
    # The copy in the run folder needs no preset, and leaves out the command line.
    says = "# The settings of recipe.yaml, with --preset likeness --preset few_pictures.\n"
    assert loaded.source_text.startswith(says)
    copy = tmp_path / "copy.yaml"
    copy.write_text(loaded.source_text)
    assert load_config(copy, ["train.steps=9"]).config == loaded.config
    assert load_config(copy).config.train.steps == 500


def test_a_problem_that_a_preset_makes_is_at_its_line(write, minimal):
    off = ["validation.item_losses=0", "validation.loss_items=0"]
    few = CONFIGS / "presets" / "few_pictures.yaml"
    at = [number for number, line in enumerate(few.read_text().splitlines(), 1) if "  every_steps:" in line]
    warnings = load_config(write(minimal), off, presets=["few_pictures"]).warnings
    assert [warning.split(": ")[0] for warning in warnings] == [f"{few}:{at[0]} validation.every_steps"]


def test_a_module_of_somebody_else_may_be_of_any_kind(write, minimal):
    path = write(minimal.replace("family: qwen_image", "family: my_package.my_family"))
    assert load_config(path, presets=["motion"]).config.lora.components == ["transformer"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("likenes", "did you mean 'likeness'? There are few_pictures, likeness, motion, style"),
        ("../qwen_lora", "There are few_pictures"),
        ("", "There are few_pictures"),
    ],
)
def test_a_preset_that_is_none_is_answered_with_the_list(refusal, write, minimal, name, reason):
    (line,) = refusal(write(minimal), presets=[name])
    assert line.startswith(f"--preset {name}: {reason}")


def test_a_preset_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--config style.yaml: is a preset; give --preset style next to"):
        load_config("style.yaml")
