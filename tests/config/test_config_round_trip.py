"""Any config, written as yaml and read again, is the same config."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from diffsynth_lite.config import Config, DataSettings, SourceSettings, dump_config, load_config
from diffsynth_lite.config.model import LoraGroup
from diffsynth_lite.config.schema import (
    Schema,
    section_of_entries,
    section_types,
    takes_null,
    without_null,
    words_instead,
)
from diffsynth_lite.config.settings import MOST_PIXELS, Settings
from diffsynth_lite.errors import UserError

TEXTS = st.one_of(
    st.sampled_from(
        ["yes", "null", "~", "0123", "1:30", "1e3", "- a", "a: b # c", "'", '"', " x ", "a\n\nb\n", "#"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
).filter(lambda text: "${" not in text and text != "???" and (text == "~" or not text.startswith("~")))


LISTED = {
    "SourceSettings": ("source", SourceSettings, lambda source: (source.path, source.dataset)),
    "LoraGroup": ("group", LoraGroup, lambda group: group.match),
}


def values_of(setting: Schema) -> st.SearchStrategy:
    """Every value that a setting may have, taken alone, by its JSON schema."""
    schema = without_null(setting)
    if section_of_entries(setting):
        name, section, identity = LISTED[section_of_entries(setting)]
        return st.lists(sections_of(name, section), max_size=2, unique_by=identity)
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


def sections_of(name: str, section: type[Settings]) -> st.SearchStrategy:
    """Every section of a kind whose settings fit together."""
    settings = section.model_json_schema()["properties"]
    drawn = st.fixed_dictionaries({key: values_of(setting) for key, setting in settings.items()})
    return drawn.map(lambda values: section(**consistent(name, values)))


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


FIXED = {"output": {"keep_every_steps": None}, "group": {"weight_decay": 0.5}}
"""Of sections in which something must have a certain value: a group of layers must differ from the rest."""
OF_A_DATASET = ("split", "revision")
OF_A_FOLDER = ("metadata", *(key for key in SourceSettings.model_fields if key.endswith(("_dir", "_dirs"))))


def defaults(keys: Iterable[str]) -> dict:
    """The defaults of settings of the data."""
    data = DataSettings(sources=[SourceSettings(path="pictures")])
    return {key: getattr(data, key) for key in keys}


def one_for_each_prompt(values: dict) -> dict:
    """The images of previews, as many as there are prompts; none to lead to without one to start from."""
    num_prompts = len(values["prompts"]) or 1
    keys = ("inputs", "last_frames", "control", "inpaint_masks")
    given = {key: values[key][:1] * num_prompts for key in keys}
    return given | ({} if given["inputs"] else {"last_frames": []})


def something_to_learn(sources: list[SourceSettings]) -> list[SourceSettings]:
    """Sources of which the first is learned, and whose losses are weighed where they differ in that."""
    are_alike = len({source.loss_weight for source in sources}) == 1
    return [
        source.model_copy(
            update=({} if place else {"preserve": False}) | ({"loss_weight": 1.0} if are_alike else {})
        )
        for place, source in enumerate(sources)
    ]


def consistent(name: str, values: dict) -> dict:
    """Drawn values with the settings that depend on others made to fit these."""
    if name == "data":
        values |= defaults(SourceSettings.model_fields) if values["sources"] else consistent("source", values)
        values |= {"preserve": False, "loss_weight": 1.0, "sources": something_to_learn(values["sources"])}
        values |= {"cache_dir": f"cache/{values['cache_dir']}"}
        values |= {} if values["cache"] else {"sealed": None}
        is_fixed = None not in (values["width"], values["height"])
        values |= {} if is_fixed else {"width": None, "height": None}
        values |= {
            "sizes": [size for size in values["sizes"] if max(map(int, size.split("x"))) <= MOST_PIXELS]
        }
        values |= defaults(["sizes"]) if is_fixed else {}
        is_given = is_fixed or values["sizes"]
        values |= defaults(["resolutions", "bucket_step", "max_aspect_ratio"]) if is_given else {}
        values |= {"crops_per_item": 1} if values["crop"] == "center" else {}
        values |= {"clips_per_video": 1} if values["clip"] in ("start", "center") else {}
    if name == "source":
        values |= {"weight": 1.0} if values["weight"] * values["repeats"] > 10_000 else {}
        is_folder = values["dataset"] is None
        values |= {"path": f"pictures/{values['path']}" if is_folder else None}
        values |= defaults(OF_A_DATASET if is_folder else OF_A_FOLDER)
        values |= {"captions": "required"} if values["trigger"] is None else {}
        for role in ("input", "layer"):
            values |= {f"{role}_columns": []} if values[f"{role}_dirs"] else {}
        for role in ("first_frame", "last_frame", "mask", "control", "inpaint_mask"):
            values |= {f"{role}_column": None} if values[f"{role}_dir"] else {}
        has_masks = values["inpaint_mask_column"] or values["inpaint_mask_dir"]
        values |= {"random_masks": 0} if has_masks else {}
    if name == "validation":
        values |= one_for_each_prompt(values)
    if name == "model":
        values |= {"quantize_skip": []} if values["quantize"] == "none" else {}
    if name in OWN_RULES:
        values |= OWN_RULES[name](values)
    values |= FIXED.get(name, {})
    if name == "train":
        values |= {"optimizer_options": {}} if reserved(values["optimizer_options"]) else {}
        values |= {"learning_rate": 1.0} if values["optimizer"] == "prodigy" else {}
        is_averaging = values["optimizer"] == "schedule_free"
        values |= {"lr_scheduler": "constant", "ema_decay": None} if is_averaging else {}
        values |= {"micro_batch_size": values["global_batch_size"]}
        values |= {"context_parallel_kind": "ulysses"} if values["context_parallel"] == 1 else {}
        values |= {"use_gradient_checkpointing": True} if values["use_gradient_checkpointing_offload"] else {}
    if name == "memory":
        is_counted = values["policy"] in ("every_n", "first_k", "last_k")
        is_listed = values["policy"] in ("skip", "only")
        values |= {"policy_n": (values["policy_n"] or 2) if is_counted else None}
        values |= {"policy_blocks": (values["policy_blocks"] or [3]) if is_listed else []}
        is_moving = (
            isinstance(values["stream_blocks"], str) or values["stream_blocks"] > values["stream_slots"]
        )
        values |= {} if is_moving and values["shard_base"] == "no" else {"stream_blocks": 0}
        values |= {} if values["auto"] else {"may_change": []}
    return values


def of_lora(values: dict) -> dict:
    if values["kind"] == "lokr":
        return values | {"use_rslora": False, "init": "default", "loraplus_ratio": 1.0, "dropout": 0.0}
    ranks = [values["rank"], *(group.rank or 2 for group in values["groups"])]
    is_default = any(rank % 2 for rank in ranks) or values["init_from"]
    return values | {"lokr_factor": None} | ({"init": "default"} if is_default else {})


def of_objective(values: dict) -> dict:
    values |= {"sigma_min": 0.0} if values["sigma_min"] >= values["sigma_max"] else {}
    is_logit_normal = values["timestep_density"].endswith("logit_normal")
    values |= {} if is_logit_normal else {"logit_mean": 0.0, "logit_std": 1.0}
    values |= {"mode_scale": 1.29} if values["timestep_density"] != "mode" else {}
    values |= {"shift_value": (values["shift_value"] or 3.0) if values["shift"] == "static" else None}
    values |= {"min_snr_gamma": 5.0} if values["loss_weighting"] != "min_snr" else {}
    values |= {"huber_delta": 0.1} if values["loss"] != "huber" else {}
    return values


OWN_RULES = {"lora": of_lora, "objective": of_objective}


def reserved(options: dict) -> bool:
    """Whether one of an optimizer's options has a setting of its own."""
    return not options.keys().isdisjoint(["lr", "weight_decay", "params", "betas", "eps"])


@st.composite
def configs(draw: st.DrawFn) -> Config:
    sections = {name: draw(sections_of(name, section)) for name, section in section_types().items()}
    changed(sections, "output", dir=f"runs/{sections['output'].dir}")
    if sections["memory"].save_attention != "no" or sections["memory"].shard_base != "no":
        changed(sections, "train", compile="off")
    if sections["memory"].policy != "all" or sections["memory"].save_attention != "no":
        changed(sections, "train", use_gradient_checkpointing=True)
    if sections["train"].context_parallel > 1:
        changed(sections, "lora", dropout=0.0)
        changed(sections, "train", compile="off", context_parallel_kind="ulysses")
        changed(sections, "model", dtype="bfloat16")
    if sections["train"].context_parallel > 1 or sections["memory"].shard_base != "no":
        changed(sections, "validation", model_path=None)
    if not sections["data"].audio:
        changed(sections, "objective", audio_noise="shared")
    if sections["train"].optimizer == "prodigy":
        changed(sections, "lora", loraplus_ratio=1.0, groups=[])
    if sections["model"].dtype == "float16":
        changed(sections, "train", mixed_precision="bf16")
    changed(sections, "validation", data=draw(st.sampled_from([None, "other"])))
    return Config(**sections)


def changed(sections: dict[str, Settings], name: str, **settings: Any) -> None:
    """Changes settings of one of the sections."""
    sections[name] = type(sections[name])(**{**dict(sections[name]), **settings})


def assert_survives_yaml(config: Config) -> None:
    """What is written of a config, and of what was read from that, is the same config again."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        loaded = load_config(path)
        assert loaded.config == config
        path.write_text(loaded.resolved_yaml, encoding="utf-8")
        assert load_config(path).config == config


@given(config=configs())
@settings(max_examples=25, deadline=None)
def test_config_to_yaml_to_config_is_the_same(config):
    assert_survives_yaml(config)


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
