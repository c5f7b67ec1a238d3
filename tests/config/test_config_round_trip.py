"""Any config, written as yaml and read again, is the same config."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from diffsynth_lite.config import Config, SourceSettings, dump_config, load_config
from diffsynth_lite.config.model import LoraGroup
from diffsynth_lite.config.schema import (
    Schema,
    section_of_entries,
    section_types,
    setting_schemas,
    takes_null,
    without_null,
    words_instead,
)
from diffsynth_lite.config.slider import SliderSettings, SliderTriple
from diffsynth_lite.errors import UserError

REQUIRED = {
    "model.family": "a",
    "model.path": "b",
    "data.path": "images",
    "output.dir": "runs/one",
}
COUPLED = (
    "data.path data.dataset data.split data.revision",
    "data.path data.media_column data.caption_columns data.metadata",
    "data.trigger data.captions",
    "data.width data.height",
    "data.crop data.crops_per_item",
    "data.clip data.clips_per_video",
    "data.audio objective.audio_noise",
    "lora.kind lora.lokr_factor",
    "memory.auto memory.may_change",
    "memory.policy memory.policy_blocks",
    "memory.policy memory.policy_n",
    "model.quantize model.quantize_skip",
    "objective.loss objective.huber_delta",
    "objective.loss_weighting objective.min_snr_gamma",
    "objective.shift objective.shift_value",
    "objective.timestep_density objective.logit_mean objective.logit_std",
    "objective.timestep_density objective.mode_scale",
    "train.context_parallel train.context_parallel_kind",
    "train.global_batch_size train.micro_batch_size",
    "train.optimizer train.learning_rate",
    "validation.inputs validation.last_frames",
)
"""Settings of which one by itself would be refused."""
ENTRIES = {
    "SourceSettings": (SourceSettings, {"path": "images"}, ("path dataset split", "trigger captions")),
    "LoraGroup": (LoraGroup, {"match": "attn", "rank": 4}, ()),
    "SliderTriple": (SliderTriple, {"neutral": "a", "positive": "b", "negative": "c"}, ()),
    "SliderSettings": (
        SliderSettings,
        {"triples": [SliderTriple(neutral="a", positive="b", negative="c")]},
        (),
    ),
}
TEXTS = st.one_of(
    st.sampled_from(
        ["yes", "null", "~", "0123", "1:30", "1e3", "- a", "a: b # c", "'", '"', " x ", "a\n\nb\n", "#"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
).filter(lambda text: "${" not in text and text != "???" and (text == "~" or not text.startswith("~")))


def values_of(setting: Schema) -> st.SearchStrategy:
    """Every value that a setting may have, one at a time, by its JSON schema."""
    schema = without_null(setting)
    if "$ref" in schema:
        return st.none() | entries(section_of_entries(setting))
    if section_of_entries(setting):
        return st.lists(entries(section_of_entries(setting)), max_size=2)
    if schema.get("type") == "object":
        ((names, option),) = schema["patternProperties"].items()
        kinds = [values_of(kind) for kind in option["anyOf"] if kind != {"type": "null"}]
        return st.dictionaries(texts(names), st.none() | st.one_of(kinds), max_size=3)
    if "enum" in schema:
        values = st.sampled_from(schema["enum"])
    elif "items" in schema:
        values = st.lists(
            values_of(schema["items"]), min_size=schema.get("minItems", 0), max_size=3, unique=True
        )
    elif schema["type"] == "boolean":
        values = st.booleans()
    elif schema["type"] == "string":
        values = texts(schema.get("pattern"))
    else:
        values = numbers(schema)
    values |= st.sampled_from(words) if (words := words_instead(setting)) else st.nothing()
    return st.none() | values if takes_null(setting) else values


@st.composite
def fitting(
    draw: st.DrawFn,
    strategies: Mapping[str, st.SearchStrategy],
    coupled: Sequence[str],
    required: Mapping[str, Any],
    make: Callable[[dict[str, Any]], Any],
) -> Any:
    """What is made of values for all settings, each taken where it fits those that were taken before."""
    values = dict(required)
    try:
        made = make(values)
    except ValidationError:
        reject()
    for keys in draw(st.permutations([*coupled, *strategies])):
        given = values | {key: draw(strategies[key]) for key in keys.split()}
        try:
            made = make(given)
        except ValidationError:
            continue
        values = given
    return made


def strategies_of(section: str) -> dict[str, st.SearchStrategy]:
    return {key: values_of(schema) for key, schema in setting_schemas()[section]["properties"].items()}


def entries(section: str) -> st.SearchStrategy:
    """Every entry of a list of sections."""
    kind, required, coupled = ENTRIES[section]
    return fitting(strategies_of(section), coupled, required, lambda values: kind(**values))


def texts(pattern: str | None) -> st.SearchStrategy:
    """The texts that a setting may have, or an entry of its list."""
    if pattern is None or pattern == r"\S":
        return TEXTS.filter(str.strip) if pattern else TEXTS
    return st.from_regex(pattern, fullmatch=True).filter(lambda text: not text.endswith("\n"))


def numbers(schema: Schema) -> st.SearchStrategy:
    """The numbers within the range of a setting."""
    least, above = schema.get("minimum", -1e9), schema.get("exclusiveMinimum", -1e9)
    most, below = schema.get("maximum", 1e9), schema.get("exclusiveMaximum", 1e9)
    if schema["type"] == "integer":
        return st.integers(int(max(least, above + 1)), int(min(most, 10**18 - 1)))
    return st.floats(
        max(least, above), min(most, below), exclude_min=above >= least, exclude_max=below <= most
    )


def config_of(values: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {name: {} for name in section_types()}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return Config.model_validate(sections)


def configs() -> st.SearchStrategy:
    strategies = {
        f"{name}.{key}": values
        for name, section in section_types().items()
        for key, values in strategies_of(section.__name__).items()
    }
    one = fitting(strategies, COUPLED, REQUIRED, config_of)
    several = st.lists(entries("SourceSettings"), min_size=1, max_size=2, unique_by=lambda each: each.path)
    return one | several.map(something_to_learn).flatmap(
        lambda sources: fitting(
            strategies, COUPLED, REQUIRED | {"data.path": None, "data.sources": sources}, config_of
        )
    )


def something_to_learn(sources: list[SourceSettings]) -> list[SourceSettings]:
    """Sources of which the first is learned, and whose losses are weighed where they differ in that."""
    are_alike = len({source.loss_weight for source in sources}) == 1
    weight = {"loss_weight": 1.0} if are_alike or any(source.preserve for source in sources) else {}
    return [
        source.model_copy(update=weight | ({} if place else {"preserve": False, "captions": "required"}))
        for place, source in enumerate(sources)
    ]


@given(config=configs())
@settings(max_examples=15, deadline=None)
def test_config_to_yaml_to_config_is_the_same(config):
    """What is written of a config, and of what was read from that, is the same config again."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        loaded = load_config(path)
        assert loaded.config == config
        path.write_text(loaded.resolved_yaml, encoding="utf-8")
        assert load_config(path).config == config


VALID = (
    "model: {family: a, path: b}\ndata:\n  sources:\n  - path: images\n"
    "output:\n  dir: runs/one\ntrain:\n  steps: 5\n"
)
JUNK = st.text(max_size=30) | st.text("ab:-[]{}#&*!|>'\"%@`,?\n\t ~.0$x\r", max_size=30)


@given(junk=JUNK, position=st.integers(0, len(VALID)))
@settings(max_examples=80, deadline=None)
def test_a_file_with_junk_in_it_raises_nothing_but_user_errors(junk, position):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes((VALID[:position] + junk + VALID[position:]).encode("utf-8", "surrogatepass"))
        try:
            answer = load_config(path).config.output.dir
        except UserError as error:
            answer = str(error)
    assert answer
