"""This file translates the config of another trainer, as far as its settings mean the same here.

The names are those of ``config/peers.py``; facts on the formats are from the examples of ai-toolkit,
SimpleTuner and diffusion-pipe, OneTrainer's code, and the documents of sd-scripts and musubi-tuner (kohya).
"""

import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from diffsynth_lite.config import load_config, section_types
from diffsynth_lite.config.document import shortened
from diffsynth_lite.config.files import did_you_mean
from diffsynth_lite.config.peers import answer_to, setting_named
from diffsynth_lite.config.settings import FilePath
from diffsynth_lite.data.records import is_image, is_video
from diffsynth_lite.doctor.starting_point import StartingPoint, config_text, setting_line
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import family_names

_TRAINERS = "ai-toolkit, kohya, musubi-tuner, OneTrainer, SimpleTuner or diffusion-pipe"
_SECTIONS = {
    "train": "train",
    "optimizer": "train",
    "network": "lora",
    "adapter": "lora",
    "sample": "validation",
    "samples": "validation",
    "save": "output",
}
"""Ours, by the section of theirs."""
_TRANSLATED = frozenset(
    [
        *(f"model.{key}" for key in ("path", "transformer_file")),
        *(f"lora.{key}" for key in ("kind", "rank", "alpha", "dropout")),
        *(f"data.{key}" for key in ("path", "repeats", "trigger", "resolutions", "frame_counts")),
        *("data.caption_dropout", "train.steps", "train.seed", "train.micro_batch_size", "train.optimizer"),
        *("train.learning_rate", "train.lr_scheduler", "train.warmup_steps", "train.weight_decay"),
        *("train.max_grad_norm", "train.mixed_precision", "train.use_gradient_checkpointing"),
        *("validation.prompts", "validation.negative_prompt", "validation.every_steps", "validation.seed"),
        *("validation.num_inference_steps", "validation.guidance_scale", "validation.num_frames"),
        *("validation.width", "validation.height", "logging.run_name", "output.dir"),
        *("output.checkpoint_every_steps", "output.checkpoint_every_minutes", "output.keep_checkpoints"),
        "output.keep_adapters",
    ]
)
"""Settings that mean the same here."""
_JOINED = ("data.resolutions", "data.frame_counts", "validation.prompts")
"""Lists, to which each place in their file may add."""
_FILES = ("dataset_config", "data_backend_config", "dataset", "concept_file_name")
"""Their keys that name a second file, of the data."""
_ACCUMULATED = ("gradient_accumulation_steps", "gradient_accumulation")
_FAMILY_KEYS = ("arch", "model_family", "network_module", "is_flux", "is_xl")
_FAMILIES = {
    **{name: "wan" for name in ("wan21", "wan22_14b", "wan22_5b")},
    **{name: "wan_i2v" for name in ("wan21_i2v", "wan22_14b_i2v")},
    **{name: "flux2" for name in ("flux_2", "flux2_klein_4b", "flux2_klein_9b")},
    **{name: "sd3" for name in ("sd35", "stable_diffusion_3", "stable_diffusion_35")},
    **{name: "ltx2" for name in ("ltx2_3", "ltxvideo2")},
    "is_flux": "flux",
    "flux_dev_1": "flux",
    "flux_fill_dev_1": "flux_fill",
    "is_xl": "sdxl",
    "stable_diffusion_xl_10_base": "sdxl",
    "qwen": "qwen_image",
    "qwen_image_edit_plus": "qwen_image_edit",
    "zimage": "z_image",
    "chroma_1": "chroma",
    "ernie": "ernie_image",
    "ideogram_4": "ideogram4",
    "krea_2": "krea2",
    "ltxvideo": "ltx_video",
    "hunyuanvideo": "hunyuan_video",
    "hv_1_5": "hunyuan_video_15",
}
"""Our model families, by their names."""
_VALUES = {
    "lora.kind": {"standard": "lora"},
    "train.optimizer": {"adamw_8bit": "adamw8bit"},
    "train.lr_scheduler": {"constant_with_warmup": "constant"},
    "train.mixed_precision": {"bfloat16": "bf16", "bfloat_16": "bf16"},
    "train.use_gradient_checkpointing": {},
}
"""Our values, by theirs in small letters."""
_KNOWN_BY = [
    ("ai-toolkit", ["job", "process"]),
    ("OneTrainer", ["training_method", "concept_file_name", "concepts"]),
    ("SimpleTuner", ["model_family", "data_backend_config"]),
    ("diffusion-pipe", ["micro_batch_size_per_gpu", "pipeline_stages", "adapter"]),
    ("musubi-tuner", ["dit"]),
    ("kohya", ["pretrained_model_name_or_path"]),
    ("musubi-tuner", ["dataset_config"]),
    ("kohya", ["network_module"]),
]
"""Keys that a trainer's config has and none of those below has."""
_MEANS_OTHERWISE = [("OneTrainer", "save_every"), ("OneTrainer", "sample_after"), ("SimpleTuner", "repeats")]
"""Keys that are settings of others: in units of their own, or counted from 0 on."""
_SECRET = re.compile(r"(token|keys?|secrets?|passwords?)$")
"""Ends of keys whose values are not shown, unless they are numbers."""
_LONG = re.compile(r"[\w-]{32,}")
"""Text that may be a secret, whatever its key."""
_REPEATED = re.compile(r"[1-9]\d{0,3}_")
"""Start of the name of a folder of kohya's that repeats."""
_NOISE = re.compile(r"(job|meta\..*|(.*\.)?process\.type)")
"""Their keys that mean nothing for a run."""
_LEAST_EDGE = 64
"""Less is not an edge, such as SimpleTuner's 1.0, a megapixel."""
_NOT_TRAINED = ["enabled false", "disabled true", "dataset_type conditioning", "dataset_type eval"]
_NOT_TRAINED += ["type validation"]
"""Keys and values, in small letters, of entries of a list that are not trained on."""
_PRESERVED = ["is_reg true", "is_regularisation_data true", "type prior_prediction"]
"""The same of data that our ``preserve`` is for."""
_OF_A_SOURCE = ("datasets", "subsets", "directory")
"""Their lists of data; settings there are not of the run."""
_ALPHA_IS_RANK = ("SimpleTuner", "diffusion-pipe")
"""Trainers whose alpha is the rank where it is not set; it is 1 in the others."""

_Leaf = tuple[tuple[str, ...], Any]
"""A value with its keys, from the top down."""


@dataclass(kw_only=True)
class Translation:
    """What another trainer's config is here.

    Attributes:
        trainer: whose it is.
        family: None where it names none that is known here.
        settings: values by our dotted keys.
        rest: lines on each of their keys that is not translated.
        paths: folders of data.
        preserved: folders of data that is not learned, but keeps the model as it is.
        edits: whether the model is trained to edit images.
    """

    trainer: str
    family: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    preserved: list[str] = field(default_factory=list)
    edits: bool = False

    def add(self, setting: str, value: object) -> bool:
        """Take a value over, if it is one here and does not differ from one before."""
        if setting == "model.path" and str(value).endswith((".safetensors", ".gguf")):
            setting = "model.transformer_file"
        if setting == "output.dir" and str(value).endswith(".safetensors"):
            return False
        if setting not in _TRANSLATED or (ours := self._ours(setting, value)) is None:
            return False
        if setting in _JOINED:
            known = self.settings.setdefault(setting, [])
            known += [one for one in ours if one not in known]
            return True
        if setting == "data.path":
            self.paths += [] if ours in self.paths else [ours]
            return True
        return bool(self.settings.setdefault(setting, ours) == ours)

    def _ours(self, setting: str, value: object) -> Any:
        """The value as the type of our setting; None where it is none."""
        if setting in _VALUES and isinstance(value, str):
            word = value.lower()
            if setting == "lora.kind" and word.startswith("networks.lora"):
                word = "lora"
            value = _VALUES[setting].get(word, word)
        if setting == "data.resolutions":
            value = self._edges(value)
        elif setting == "validation.prompts" and str(value).endswith((".txt", ".json", ".toml", ".yaml")):
            return None
        elif setting in _JOINED and not isinstance(value, list):
            value = [value]
        section, _, key = setting.partition(".")
        own = section_types()[section].model_fields[key]
        type_of_ours: Any = Annotated[own.annotation, own]  # with the ranges of the field
        try:
            return TypeAdapter(type_of_ours).validate_python(value)
        except ValidationError:
            return None

    def _edges(self, value: object) -> object:
        """Edges of squares; of kohya's programs, which have width and height, only a square is one."""
        listed: Any = value.split(",") if isinstance(value, str) else value
        edges: list[Any] = listed if isinstance(listed, list) else [listed]
        is_pair = len(edges) == 2 and self.trainer in ("kohya", "musubi-tuner")
        try:
            edges = [float(edge) for edge in edges]
        except (TypeError, ValueError):
            return None  # such as diffusion-pipe's pairs of a width and a height
        if (is_pair and edges[0] != edges[1]) or any(edge < _LEAST_EDGE for edge in edges):
            return None
        return list(dict.fromkeys(edges))

    def take_family(self, key: str, value: object) -> bool:
        """Take over the name of a model; whether it is known here."""
        name = key if value is True else str(value).lower().partition(":")[0]
        name = name.removeprefix("networks.").removeprefix("lora_").replace("-", "_").replace(".", "_")
        if self.trainer == "musubi-tuner":
            name = {"lora": "hunyuan_video", "flux": "flux_kontext"}.get(name, name)
        name = _FAMILIES.get(name, name)
        if name in family_names():
            self.family = name
        return self.family == name


def translation_of(path: Path, folder: Path | None = None) -> Translation:
    """Read another trainer's config, and the file of its data where it names one that is there.

    Args:
        folder: the data, instead of theirs.
    """
    values = _parsed(path)
    if not isinstance(values, Mapping):
        raise UserError(f"--from {path}: is not a config of {_TRAINERS}: it has no keys")
    found = Translation(trainer=_trainer_of(values, path))
    leaves = _trained_on(found, list(_all_leaves(values, path)))
    accumulated = _take_all(found, leaves)
    if "train.micro_batch_size" in found.settings or accumulated > 1:
        batch = found.settings.setdefault("train.micro_batch_size", 1)
        found.settings["train.global_batch_size"] = batch * accumulated
    if (name := found.settings.get("logging.run_name")) and "output.dir" in found.settings:
        found.settings["output.dir"] += f"/{name}"  # here a folder holds one run
    if rank := found.settings.get("lora.rank"):
        found.settings.setdefault("lora.alpha", rank if found.trainer in _ALPHA_IS_RANK else 1)
    paths = [str(found.settings.get(f"model.{key}", "")).lower() for key in ("path", "transformer_file")]
    if found.family is None and any("xl" in Path(path).name for path in paths):
        found.family = "sdxl"  # kohya's file does not name it
    if found.edits and f"{found.family}_edit" in family_names():
        found.family = f"{found.family}_edit"
    if folder:
        found.paths, found.preserved = [str(folder)], []
    _put_trigger_into_prompts(found)
    _add_data(found)
    _note_steps(found, leaves)
    return found


def _take_all(found: Translation, leaves: Sequence[_Leaf]) -> int:
    """Take over what can be, and list the rest; the forwards that a step accumulates."""
    accumulated = 1
    preserved = _entries(leaves, _PRESERVED)
    by_area = {place[:-1] for place, value in leaves if place[-1] == "resolution_type" and value == "area"}
    for place, value in sorted(leaves, key=lambda leaf: leaf[0][-1] != "unet_lr"):  # it overrides another
        *parents, key = place
        words = [*(part for part in parents if not part.isdecimal()), key]
        if key == "resolution" and place[:-1] in by_area:
            value = _edge_of_megapixels(value)
        if key in _ACCUMULATED and str(value).isdecimal():
            accumulated = int(value)
            continue
        is_known = _is_translated(found, words, value, is_preserved=_is_below(place, preserved))
        if not is_known and not _NOISE.fullmatch(name := ".".join(words)):
            found.rest.append(f"{name}: {_shown(key, value)}")
    return accumulated


def _edge_of_megapixels(value: object) -> object:
    """The edge of a square of SimpleTuner's megapixels, in steps of 64 pixels as it has them."""
    try:
        return round(math.sqrt(float(str(value))) * 1000 / 64) * 64
    except (ValueError, OverflowError):
        return value


def _put_trigger_into_prompts(found: Translation) -> None:
    """Write out the trigger where ai-toolkit has a placeholder, which captions may have too."""
    trigger = found.settings.get("data.trigger")
    if found.trainer != "ai-toolkit" or trigger is None:
        return
    if prompts := found.settings.get("validation.prompts"):
        found.settings["validation.prompts"] = [one.replace("[trigger]", trigger) for one in prompts]
    found.rest.append("[trigger]: replaced in prompts; captions that have it are to be changed")


def _trained_on(found: Translation, leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """What is left without entries that are off or are not of training, which are listed."""
    off = _entries(leaves, _NOT_TRAINED)
    for entry, why in off.items():
        own = {place[-1]: value for place, value in leaves if place[:-1] == entry}
        name = next((value for key, value in own.items() if _setting_of(entry[-2], key) == "data.path"), "")
        found.rest.append(f"{entry[-2]}: {name and f'{name}, '}left out: {why}")
    return [(place, value) for place, value in leaves if not _is_below(place, off)]


def _entries(leaves: Sequence[_Leaf], marks: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Places of the entries of lists that have one of some keys and values, and which."""
    return {
        place[:-1]: f"{place[-1]}: {str(value).lower()}"
        for place, value in leaves
        if len(place) > 2 and place[-2].isdecimal() and f"{place[-1]} {value}".lower() in marks
    }


def _is_below(place: tuple[str, ...], entries: Mapping[tuple[str, ...], str]) -> bool:
    return any(place[: len(entry)] == entry for entry in entries)


def _repeats_in_names(found: Translation) -> dict[str, int]:
    """Kohya's folders such as ``10_ohwx`` and how often each repeats; they replace the folder above."""
    repeats: dict[str, int] = {}
    for path in found.paths if found.trainer == "kohya" else ():
        named = [folder for folder in sorted(Path(path).glob("*_*/")) if _REPEATED.match(folder.name)]
        repeats |= {str(folder): int(folder.name.partition("_")[0]) for folder in named} or {path: 1}
    return repeats


def _note_steps(found: Translation, leaves: Sequence[_Leaf]) -> None:
    """List what passes over the data are in steps, where its folders can be read."""
    own = {"path": found.settings.get("data.path"), "repeats": found.settings.get("data.repeats", 1)}
    items = 0
    for source in found.settings.get("data.sources", [own] if own["path"] else []):
        files = [file.name for file in Path(source["path"]).rglob("*")]
        items += sum(is_image(name) or is_video(name) for name in files) * source.get("repeats", 1)
    for place, value in leaves:
        if items and str(value).isdecimal() and answer_to(place[-1]) == answer_to("epochs"):
            steps = math.ceil(int(value) * items / found.settings.get("train.global_batch_size", 1))
            start = f"{place[-1]}: {value}"
            found.rest = [line for line in found.rest if start not in line]
            found.rest.append(
                f"{start} of {items} items, with repeats, is about {steps} steps: set train.steps"
            )


def _add_data(found: Translation) -> None:
    """Set the folders of data; of several, each has the trigger, and a single learned one the repeats."""
    if not found.paths:
        found.rest += [f"{path}: left out, as there is no data that is learned" for path in found.preserved]
        return
    repeats = _repeats_in_names(found)
    found.paths = list(repeats) or found.paths
    if not found.preserved and len(found.paths) == 1:
        found.settings["data.path"] = found.paths[0]
        if (times := repeats.get(found.paths[0], 1)) > 1:
            found.settings["data.repeats"] = times
        return
    each = ("trigger", "repeats") if len(found.paths) == 1 else ("trigger",)
    common = {key: found.settings.pop(f"data.{key}") for key in each if f"data.{key}" in found.settings}
    named = {path: {"repeats": times} for path, times in repeats.items() if times > 1}
    learned = [{"path": path, **common, **named.get(path, {})} for path in found.paths]
    preserved = [{"path": path, "preserve": True} for path in found.preserved]
    found.settings |= {"data.path": None, "data.sources": [*learned, *preserved]}
    if repeats := found.settings.pop("data.repeats", None):
        found.rest.append(f"repeats: {repeats}; of several folders they are set in data.sources")


def _is_translated(found: Translation, words: Sequence[str], value: object, *, is_preserved: bool) -> bool:
    """Whether a value of theirs is one of ours, which is then taken over.

    Args:
        words: its keys, from the top down.
        is_preserved: whether it belongs to data that is not learned.
    """
    *parents, key = words
    parent = parents[-1] if parents else ""
    if is_preserved and f"{key} {value}".lower() in _PRESERVED:
        return True
    is_family = key in _FAMILY_KEYS or (parent, key) == ("model", "type")
    if is_family or (key == "model_type" and found.trainer == "OneTrainer"):
        is_known = found.take_family(key, value)
        # It also shows that this is a LoRA.
        return found.add("lora.kind", value) or is_known if key == "network_module" else is_known
    if (found.trainer, key) in _MEANS_OTHERWISE:
        return False
    if (parent, key) == ("model_kwargs", "edit") and value is True:
        found.edits = True
        return True
    setting = _setting_of(parent, key)
    if setting is None or _is_of_a_part(parents, setting):
        return False
    if is_preserved and setting == "data.path":
        found.preserved.append(str(value))
        return True
    return not is_preserved and found.add(setting, value)


def _is_of_a_part(parents: Sequence[str], setting: str) -> bool:
    """Whether a key is not of the run, as it is of a text encoder, of another optimizer or of some data."""
    if any(name.startswith("text_encoder") or name == "optimizer_defaults" for name in parents):
        return True
    if "concepts" in parents:
        return setting != "data.path"
    is_of_data = setting.startswith("data.") or setting == "train.micro_batch_size"
    return not is_of_data and not set(_OF_A_SOURCE).isdisjoint(parents)


def _shown(key: str, value: object) -> str:
    """A value of theirs with what is known of its key; not that of a secret."""
    is_number = isinstance(value, int | float)
    is_secret = not is_number and (_SECRET.search(key.lower()) or _LONG.fullmatch(str(value)))
    text = "..." if is_secret else shortened(json.dumps(value, default=str))
    try:
        TypeAdapter(FilePath).validate_python(value if isinstance(value, str) else ".")
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        text += f"; {reason}" if "path of Windows" in reason else ""
    answer = answer_to(key)
    return f"{text}; {key} {answer}" if answer and "another trainer" not in answer else text


def _setting_of(parent: str, key: str) -> str | None:
    """Our setting for a key of theirs."""
    sections = section_types()
    own = _SECTIONS.get(parent)
    if own and key in sections[own].model_fields:
        return f"{own}.{key}"
    if named := setting_named(f"{parent}.{key}") or setting_named(key):
        return named
    homes = [name for name in sections if name != "validation" and key in sections[name].model_fields]
    return f"{homes[0]}.{key}" if len(homes) == 1 else None


def _all_leaves(values: Mapping[str, Any], path: Path) -> Iterator[_Leaf]:
    """Places and values of a config and of the file of its data, those that are not empty."""
    for place, value in _leaves(values):
        named = (path.parent / str(value), Path(str(value))) if place[-1] in _FILES else ()
        if second := next((file for file in named if file.is_file()), None):
            data = _parsed(second)
            yield from _leaves(data if isinstance(data, Mapping) else {"datasets": data})
        else:
            yield place, value


def _leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, (*place, _plain(key)))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, below in enumerate(value):
            yield from _leaves(below, (*place, str(number)))
    elif value is not None and value not in ("", []):
        yield place, value


def _plain(key: object) -> str:
    return str(key).lstrip("-")


def _trainer_of(values: Mapping[str, Any], path: Path) -> str:
    """Whose config it is, by keys that only one has."""
    keys = {place[-1] for place, _ in _leaves(values)} | {_plain(key) for key in values}
    for trainer, some in _KNOWN_BY:
        if not keys.isdisjoint(some):
            return trainer
    raise UserError(f"--from {path}: is not a config of {_TRAINERS} for training a LoRA")


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        json.dumps(values, default=str, skipkeys=True)  # refuses a yaml alias that holds itself
        return values
    except FileNotFoundError:
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.*")]).strip()
        hint = near or f"check the path (working folder: {Path.cwd()})"
        raise UserError(f"--from {path}: there is no such file; {hint}") from None
    except OSError as error:
        raise UserError(f"--from {path}: cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"--from {path}: cannot be read: {shortened(str(error))}") from None


def translated_config(found: Translation, start: StartingPoint, theirs: Path, commands: Sequence[str]) -> str:
    """The yaml of a run with the settings of another trainer's config, on top of a recipe.

    Args:
        theirs: file of that config.
        commands: what to type next, for its head.
    """
    if "data.resolutions" in found.settings and load_config(start.recipe).config.data.width is not None:
        found.settings |= {"data.width": None, "data.height": None}
    sections: dict[str, list[str]] = defaultdict(list)
    for setting, value in found.settings.items():
        section, _, key = setting.partition(".")
        sections[section].append(setting_line(key, value, ""))
    return config_text(
        f"{start.family}, translated from {shortened(str(theirs))}, a config of {found.trainer}.",
        commands,
        remarks=["", "# Not translated:", *(f"#   {line}" for line in found.rest)] if found.rest else [],
        extends=start.recipe,
        sections=sections,
    )
