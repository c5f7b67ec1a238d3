"""A config that extends another has its settings, and its own on top, each problem at its own line."""

from pathlib import Path

import pytest

from diffsynth_lite.config import find_config_file, load_config
from diffsynth_lite.errors import UserError


@pytest.fixture
def files(tmp_path, minimal):
    """Writes files of a folder by name, beside ``base.yaml``, and gives the path of the last."""

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
    assert (loaded.config.model.path, loaded.config.data.path) == ("some/model", "pictures")
    assert loaded.config.data.resolutions == [64]
    assert loaded.config.logging.project == "runs/one"
    # The copy in the run folder needs none of them, and leaves out the command line.
    names = "top.yaml, which extends middle.yaml, which extends base.yaml"
    assert loaded.source_text.startswith(f"# What {names}, says.\n")
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


def test_each_problem_is_at_its_line_of_its_file(files, tmp_path):
    path = files(
        wrong="train:\n  steps: many\n  sed: 1\nlora:\n  rank: 0\n",
        top="extends: wrong.yaml\n\nlora:\n  rank: 4\n  alpha: x\n",
    )
    with pytest.raises(UserError) as caught:
        load_config(path)
    wrong = tmp_path / "wrong.yaml"
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        f"{wrong}:2 train.steps",
        f"{wrong}:3 train.sed",
        # Though another takes its place.
        f"{wrong}:5 lora.rank",
        f"{path}:5 lora.alpha",
        *(f"{path}:1 {name}" for name in ("model.family", "model.path", "data.path", "output.dir")),
    ]


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
def test_a_file_that_cannot_be_extended_is_refused_at_the_line_that_names_it(files, line, reason):
    path = files(back="extends: top.yaml\n", top=f"# one\n{line}\n")
    with pytest.raises(UserError) as caught:
        load_config(path)
    place, _, message = str(caught.value).partition(" extends: ")
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
def test_of_a_file_that_is_no_config_nothing_is_shown(files, text):
    path = files(other=text, top="extends: other.yaml\n")
    with pytest.raises(UserError) as caught:
        load_config(path)
    other = path.parent / "other.yaml"
    assert str(caught.value) == (
        f"{other}:1: is not a config: no line of it begins a section, such as 'train:'"
    )


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
def test_the_key_is_suggested_in_a_file_and_not_on_the_command_line(files, line, override, reason):
    with pytest.raises(UserError) as caught:
        load_config(files(top=f"{line}\n"), [override])
    assert reason in str(caught.value)
