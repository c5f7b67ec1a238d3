"""docs/configuration.md says what the code says, and configs/schema.json makes editors check it."""

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from diffsynth_lite.config import SourceSettings
from diffsynth_lite.config.model import LoraGroup
from diffsynth_lite.config.reference import render_reference, render_schema
from diffsynth_lite.config.schema import (
    section_types,
    setting_schemas,
    without_null,
)
from diffsynth_lite.config.slider import SliderSettings
from diffsynth_lite.pipelines import family_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "configs" / "schema.json"
RECIPES = [
    path
    for path in sorted(SCHEMA.parent.rglob("*.yaml"))
    if path.parent.name not in ("presets", "accelerate")
]


def test_the_page_is_the_one_that_is_generated():
    assert PAGE.read_text(encoding="utf-8") == render_reference(), "run scripts/generate_docs.py"


def page_of(heading: str) -> str:
    """The page from a heading to the next one of its level."""
    level = heading.split(" ")[0]
    return PAGE.read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split(f"\n{level} ")[0]


@pytest.mark.parametrize(("name", "section"), section_types().items())
def test_every_setting_is_described_and_on_the_page(name, section):
    own, _, of_entries = page_of(f"## {name}").partition("\n### ")
    for key, setting in section.model_fields.items():
        assert setting.description.endswith(".")
        assert "|" not in setting.description, "would break the table"
        is_of_entries = issubclass(section, SourceSettings) and key in SourceSettings.model_fields
        assert (of_entries if is_of_entries else own).count(f"\n| `{key}` | ") == 1


@pytest.mark.parametrize(
    ("name", "entry"),
    [("data.sources", SourceSettings), ("lora.groups", LoraGroup), ("objective.slider", SliderSettings)],
)
def test_the_settings_of_an_entry_have_a_table_of_their_own(name, entry):
    table = page_of(f"### {name}").split("\n## ")[0].split("\n#### ")[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert rows == list(entry.model_fields)


@pytest.mark.parametrize(
    "model",
    [
        "SourceSettings",
        "LoraGroup",
        "SliderSettings",
        *(type_.__name__ for type_ in section_types().values()),
    ],
)
def test_every_number_has_a_least_and_a_largest_value(model):
    for key, setting in setting_schemas()[model]["properties"].items():
        number = without_null(without_null(setting).get("items", setting))
        if number.get("type") in ("integer", "number"):
            assert {"minimum", "exclusiveMinimum"} & number.keys(), key
            assert {"maximum", "exclusiveMaximum"} & number.keys(), key


def test_no_setting_holds_a_secret():
    words = {
        word
        for section in section_types().values()
        for key in section.model_fields
        for word in key.split("_")
    }
    assert words & {"token", "secret", "password", "key"} == set()


class EditorLoader(yaml.SafeLoader):
    """Reads plain values as editors do, by yaml 1.2: ``no`` and ``1:30`` are text, ``1e-4`` is a number."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # yaml's own way


for kind, form, first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    EditorLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^({form})$"), first)


def problems(text: str) -> list[str]:
    """Where an editor underlines something in a config, as ``section.key``."""
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    found = validator.iter_errors(yaml.load(text, EditorLoader))
    return sorted(".".join(map(str, error.absolute_path)) for error in found)


def test_the_schema_is_the_one_that_is_generated() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == render_schema(family_names()), "run scripts/generate_docs.py"
    jsonschema.Draft7Validator.check_schema(json.loads(SCHEMA.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    place = os.path.relpath(SCHEMA, path.parent)
    assert text.startswith(f"# yaml-language-server: $schema={place}\n")
    assert problems(text) == []


@pytest.mark.parametrize(
    "setting",
    [
        "train: {steps: 5, learning_rate: 1e-4, use_gradient_checkpointing: off, mixed_precision: no}",
        "train: {steps: '${validation.loss_items}', cpu_threads: null, max_grad_norm: '${oc.env:NORM,1}'}",
        "train: {use_gradient_checkpointing: '${train.deterministic}', lr_scheduler: '${oc.env:SCHEDULER}'}",
        "lora: {target_modules: [to_q, '${oc.env:LAYER}']}",
        "lora: {target_modules: '${lora.components}', alpha: 16}",
        "lora: {target_modules: attention}",
        "logging: {run_name: 0123, project: 2024, trackers: ['${oc.env:TRACKER}']}",
        "memory: {policy: only, policy_blocks: [0, 1]}",
        "train:",
    ],
)
def test_what_a_config_may_hold_is_not_underlined(minimal: str, setting: str) -> None:
    assert problems(f"{minimal}{setting}\n") == []


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("trian: {steps: 5}", ""),
        ("train: {stps: 5}", "train"),
        ("train: {steps: many}", "train.steps"),
        ("train: {steps: 0}", "train.steps"),
        ("train: {steps: null}", "train.steps"),
        ("train: {steps: 1.5}", "train.steps"),
        ("train: {learning_rate: fast}", "train.learning_rate"),
        ("train: {use_gradient_checkpointing: 2}", "train.use_gradient_checkpointing"),
        ("train: {lr_scheduler: Cosine}", "train.lr_scheduler"),
        ("lora: {target_modules: to_q}", "lora.target_modules"),
        ("lora: {target_modules: []}", "lora.target_modules"),
        ("lora: {dropout: 1}", "lora.dropout"),
        ("logging: {project: ''}", "logging.project"),
        ("logging: {trackers: [wandb, wandb]}", "logging.trackers"),
        ("logging: {trackers: [mlflow]}", "logging.trackers.0"),
        ("memory: 5", "memory"),
    ],
)
def test_a_wrong_key_or_value_is_underlined(minimal: str, setting: str, place: str) -> None:
    assert problems(f"{minimal}{setting}\n") == [place]


def test_what_a_file_must_give_is_underlined_where_it_is_missing_and_not_where_another_may_give_it() -> None:
    assert problems("extends: qwen_lora.yaml\nmodel: {quantize: int8}\n") == []
    assert problems("model: {family: fluxx}\ndata: {sources: [{pth: a}], sizes: [64]}\n") == [
        "",
        "data.sizes.0",
        "data.sources.0",
        "model",
        "model.family",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learning_rate: fast}", "'fast' is not of type 'number'"),
        ("train: {cpu_threads: x}", "'x' is not of type 'integer', 'null'"),
        ("train: {mixed_precision: fast}", "'fast' is not one of ['no', 'bf16']"),
        ("lora: {target_modules: to_q}", "'to_q' is not one of ['attention', 'all']"),
        ("model: {family: fluxx}", "'fluxx' is not one of ['anima', "),
        ("model: {family: my_package.my_family}", None),
    ],
)
def test_what_is_underlined_is_explained_by_the_values_and_not_by_references(text, message) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    config = yaml.load(f"extends: qwen_lora.yaml\n{text}\n", EditorLoader)
    error = jsonschema.exceptions.best_match(jsonschema.Draft7Validator(schema).iter_errors(config))
    assert error is None if message is None else error.message.startswith(message)


def test_an_editor_proposes_families_and_choices() -> None:
    sections = json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"]
    proposed = {
        key: sections[section]["properties"][key].get("examples")
        for section, key in (("model", "family"), ("train", "mixed_precision"), ("data", "cache"))
    }
    assert proposed == {"family": family_names(), "mixed_precision": ["no", "bf16"], "cache": [True, False]}
