"""A setting is changed in the text of a config: only it differs, and comments stay."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diffsynth_lite.config.editing import settings_of, with_value
from diffsynth_lite.config.files import read_config_files
from diffsynth_lite.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "accelerate"]
PROMPTS = "validation:\n  prompts:  # p\n    - a  # A\n    # of b\n    - b\n  # tail\ntrain:\n  steps: 3\n"
SCALAR = "train:\n  steps: |\n    3\n\n  # c\n  seed: 1\n"
REMARK = "lora:\n  rank: 3  # three,\n           # not four\n# model\n"
CHANGES = [
    ("", "train.steps", "7", "train:\n  steps: 7\n"),
    ("# mine", "train.steps", "7", "# mine\ntrain:\n  steps: 7\n"),
    ("train:  # t\nlora:\n  rank: 3", "train.steps", "7", "train:  # t\n  steps: 7\nlora:\n  rank: 3"),
    ("train:\n    steps: 3  # three", "train.steps", "7", "train:\n    steps: 7  # three"),
    ("train:\n    steps: 3  # three", "train.seed", "1", "train:\n    steps: 3  # three\n    seed: 1"),
    ("train:\n  seed:\n", "train.seed", "1", "train:\n  seed: 1\n"),
    ("a: 1\r\ntrain:\r\n  steps: 3\r\n", "train.seed", "1", "a: 1\r\ntrain:\r\n  steps: 3\r\n  seed: 1\r\n"),
    ("a: 1\r\ntrain:\r\n  steps: 3\r\n", "train.steps", None, "a: 1\r\n"),
    ("train:\n  # t\n  steps: 3\n", "train.steps", None, "train:\n  # t\n"),
    ("train: {steps: 3, seed: 2}\n", "train.steps", "7", "train: {steps: 7, seed: 2}\n"),
    ("train: {steps: 3, seed: 2}\n", "train.steps", None, "train: {seed: 2}\n"),
    ("train: {steps: 3, seed: 2}\n", "train.seed", None, "train: {steps: 3}\n"),
    ("train: {}\n", "train.seed", "1", "train: {seed: 1}\n"),
    (SCALAR, "train.steps", "7", "train:\n  steps: 7\n\n  # c\n  seed: 1\n"),
    (PROMPTS, "validation.prompts", "[a, x, 'c: d']", PROMPTS.replace("- b\n", "- x\n    - 'c: d'\n")),
    (PROMPTS, "validation.prompts", "[b]", PROMPTS.replace("    - a  # A\n", "")),
    (PROMPTS, "validation.prompts", "[c, a, b]", PROMPTS.replace("    - a", "    - c\n    - a")),
    ("data:\n  a:\n  - b\n  - c\n", "data.a", "[]", "data:\n  a: []\n"),
    ("a: 1\n", "validation.prompts", "[a, b]", "a: 1\nvalidation:\n  prompts:\n    - a\n    - b\n"),
    ("a: 1\n", "data.resolutions", "[512]", "a: 1\ndata:\n  resolutions: [512]\n"),
    (REMARK, "lora.alpha", "1", REMARK.replace("four\n", "four\n  alpha: 1\n")),
    (REMARK, "lora.rank", None, "# model\n"),
    ("a: 1\n", "train.steps", None, "a: 1\n"),
]
REFUSED = [
    (PROMPTS, "validation.prompts", "[]"),  # the comment about b would go
    ("{train: {steps: 3}}\n", "lora.rank", "1"),
    ("train:\n  steps: 3\n  steps: 4\n", "train.steps", "7"),
    ("train: 5\n", "train.steps", "7"),
    ("- a\n", "train.steps", "7"),
    ("a: 1\n...\n", "train.steps", "7"),
    ("train: {trigger: b}\n", "train.trigger", "a, b"),
    ("a: 1\n", "train.steps", "7\nb: 2"),
    ("a: 1\n", "train.steps", "[7"),
]


@pytest.mark.parametrize(("text", "key", "value", "expected"), CHANGES)
def test_a_setting_is_changed_where_it_is(text, key, value, expected):
    assert with_value(text, key, value) == expected


@pytest.mark.parametrize(("text", "key", "value"), REFUSED)
def test_what_cannot_be_changed_by_itself_is_refused(text, key, value):
    with pytest.raises(UserError, match=f"^{key}: cannot be changed by itself"):
        with_value(text, key, value)


def test_a_text_that_is_not_yaml_is_refused_with_its_line():
    with pytest.raises(
        UserError, match=r"^train\.seed: line 3 of the text must be put right first: not valid"
    ):
        with_value("train:\n  steps: [1,\n", "train.seed", "1")


def _require_only_change(text: str, key: str, value: str | None) -> None:
    """Check by another reader of yaml, and line by line, that nothing else changes."""
    section, name = key.split(".")
    changed = with_value(text, key, value)
    wanted = {part: own for part, own in (yaml.safe_load(text) or {}).items() if own}
    own = {each: old for each, old in wanted.pop(section, {}).items() if each != name}
    if value is not None:
        own[name] = yaml.safe_load(value)
    wanted |= {section: own} if own else {}
    assert {part: own for part, own in (yaml.safe_load(changed) or {}).items() if own} == wanted
    # Full lines of comments are not the setting's, unless they go on further in.
    remarks = [line for line in text.splitlines() if line[:4].strip().startswith("#")]
    assert [line for line in changed.splitlines() if line[:4].strip().startswith("#")] == remarks
    if value is not None:
        assert len(set(text.splitlines()) - set(changed.splitlines())) <= 1


def test_in_every_recipe_only_the_setting_changes():
    edits = [("train.steps", "7"), ("data.path", "'a: #b'"), ("train.loss_seed", "1"), ("model.path", None)]
    for place, path in enumerate(RECIPES):
        _require_only_change(path.read_text(), *edits[place % len(edits)])


VALUES = st.sampled_from(
    ["7", "1.0e-4", "word", "'it''s: # x'", '"a\\n\\u00e4"', "[1, 2]", "[a b, 'c, d']", "null"]
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Configs of two sections, with comments and empty lines wherever they may be."""
    lines = []
    for section in draw(st.lists(st.sampled_from(["train", "data", "lora"]), unique=True)):
        keys = draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True))
        entries = [(key, draw(VALUES)) for key in keys]
        if draw(st.booleans()):
            lines.append(f"{section}: {{{', '.join(map(': '.join, entries))}}}  # flow")
            continue
        lines.append(f"{section}:{draw(st.sampled_from(['', '  # section']))}")
        for key, value in entries:
            lines += draw(st.lists(st.sampled_from(["", "  # about it", "# left"]), max_size=2))
            lines.append(f"  {key}: {value}{draw(st.sampled_from(['', ' # same line', '  ']))}")
    return draw(st.sampled_from(["\n", "\r\n"])).join([*lines, ""] if draw(st.booleans()) else lines)


@settings(max_examples=40, deadline=None)
@given(texts(), st.sampled_from(["train.a", "data.b", "lora.c"]), VALUES | st.none())
def test_in_any_text_only_the_setting_changes(text, key, value):
    _require_only_change(text, key, value)
    changed = with_value(text, key, value)
    assert with_value(changed, key, value) == changed


def test_what_holds_without_a_file_is_what_those_that_it_extends_have(tmp_path):
    path = tmp_path / "mine.yaml"
    files = read_config_files(path, "extends: qwen_24gb.yaml\nmodel: {quantize: nf4}\ntrain:\n")
    inherited, own = settings_of(files[:-1]), settings_of(files[-1:])
    assert {key: node.value for key, node in own.items()} == {"model.quantize": "nf4"}
    assert (inherited["model.quantize"].value, inherited["train.steps"].value) == ("int8", "2000")
