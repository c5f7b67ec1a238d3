"""This file looks at a folder of media, by headers only, and writes the config that a run starts from."""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from statistics import median_low

import yaml
from PIL import Image
from pydantic import ValidationError

from diffsynth_lite.captioning.report import CaptionReport
from diffsynth_lite.config import Config, find_config_file, load_config
from diffsynth_lite.config.document import shortened
from diffsynth_lite.config.files import Preset, if_in_clone, schema_line
from diffsynth_lite.data.folder import list_folder
from diffsynth_lite.data.images import ImageFacts, check_image
from diffsynth_lite.data.plan import settings_to_skip
from diffsynth_lite.data.records import Record, Source, is_image, is_video
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.data.video import VideoFacts, check_video, max_frames, read_frames
from diffsynth_lite.doctor.findings import counted
from diffsynth_lite.doctor.model_choice import FittingModel, fitting_models, recipe_for
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines import family_names, load_family
from diffsynth_lite.training.planning.gpus import Gpu

_DEFAULTS: Mapping[RecordKind, tuple[str, str]] = {
    "image": ("qwen_image", "as the folder holds images; it is the README's example"),
    "video": ("wan", "as the folder holds clips; Wan 2.1 1.3B is the smallest model for them"),
    "edit": ("qwen_image_edit", "as its images come from others"),
    "layers": ("qwen_image_layered", "as its images have layers"),
    "inpaint": ("flux_fill", "as its images have masks"),
}
"""The family that is taken where none is named, and why, by what the folder holds."""
_OF_CLIPS: tuple[RecordKind, ...] = ("video", "image_to_video")
_COMPANIONS: Mapping[RecordKind, tuple[str, str]] = {
    "edit": ("--inputs", "are of images, and the folder holds clips"),
    "layers": ("--layers", "are of images without --inputs"),
    "inpaint": ("--masks", "are of images without --inputs and --layers"),
}
"""The flag that names the files which such data need, and why other data have none; the first one wins."""
_SETTINGS = {
    "input_dirs": ("--inputs", "what they come from, by the same names", "input_columns", []),
    "layer_dirs": ("--layers", "their layers, from the bottom up", "layer_columns", []),
    "inpaint_mask_dir": ("--masks", "white is what is regenerated", "random_masks", 0),
}
"""The flag of each setting, a remark, and the setting that it takes the place of, with its value for off."""
_EDGE_STEP = 64
"""Pixels that a proposed resolution is a multiple of."""
_SMALLEST_CARD_GB = 8
"""That a recipe is made for."""
_FRAME_STEP = 8
"""Frames of proposed clips are a multiple of it and one: right for families that take 4 k + 1 and 8 k + 1."""
_NO_TRIGGERS = frozenset(
    ["a", "an", "the", "photo", "picture", "image", "video", "clip", "portrait", "painting"]
)


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """The starting point of a run on a folder.

    Attributes:
        recipe: the config, as ``extends`` names it.
        kind: of the data that the recipe is for.
        model: as ``model.path``, where it is not the recipe's.
        reason: why the family was taken; empty where it was given.
        fitting: the models that fit the card, where one is known and no family was given.
    """

    family: str
    recipe: str
    kind: RecordKind
    model: str | None = None
    reason: str = ""
    fitting: Sequence[FittingModel] = ()


@dataclass(frozen=True, kw_only=True)
class FolderFindings:
    """The content of a folder of media.

    Attributes:
        sizes: from the headers of the images and clips that can be read.
        records: its items that can be used, by all that is known without their pixels.
        strays: names of the clips among images that are learned, or of the images among clips.
        skip_settings: that leave out these and what cannot be used.
        problems: errors in captions and names, as a run would report them.
    """

    path: Path
    source: Source
    num_images: int
    num_clips: int
    sizes: Sequence[ImageFacts | VideoFacts]
    records: Sequence[Record]
    strays: Sequence[str]
    skip_settings: str
    problems: Sequence[str]

    @property
    def summary(self) -> str:
        """Such as ``24 images, 2 of which cannot be used yet; 800 x 600 to 4032 x 3024 pixels``."""
        kinds = [(self.num_images, "image"), (self.num_clips, "clip")]
        words = " and ".join(counted(number, name) for number, name in kinds if number)
        if bad := self.num_images + self.num_clips - len(self.records):
            words += f", {bad} of which cannot be used yet"
        if not self.sizes:
            return words
        small, large = (chosen(self.sizes, key=_area) for chosen in (min, max))
        return f"{words}; {small.width} x {small.height} to {large.width} x {large.height} pixels"


def starting_point(
    path: Path,
    family: str | None,
    *,
    given: Collection[str] = (),
    gpu: Gpu | None = None,
) -> StartingPoint:
    """A model family and its recipe: that of the family, or else what suits the folder and the card.

    Args:
        family: name, or the dotted path of a module elsewhere.
        given: flags that name files of the same names: ``--inputs``, ``--layers``, ``--masks``.
        gpu: that is to train it, where that is known.
    """
    own = load_family(family).starting_recipes if family else {}
    kinds: tuple[RecordKind, ...] = ("image", "video")
    learned = "images"
    if _learns_clips(path, own):
        learned, kinds = "clips", _OF_CLIPS
    else:
        for kind, (flag, _) in _COMPANIONS.items():
            if flag in given or (kind in own and "image" not in own):
                learned, kinds = f"images with {flag}", (kind,)
                break
    for kind, (flag, why) in _COMPANIONS.items():
        if flag in given and kind not in kinds:
            raise UserError(f"{flag}: {why}; leave it out")
    default, reason = _DEFAULTS[kinds[0]]
    name = family or default
    if found := _recipe_of(name, kinds):
        start = StartingPoint(family=name, recipe=found[1], kind=found[0], reason="" if family else reason)
        return start if gpu is None else _for_card(start, kinds, gpu, is_given=family is not None)
    # Imports every family, which takes seconds: only for the message.
    others = ", ".join(other for other in family_names() if _recipe_of(other, kinds))
    raise UserError(f"--family {family}: has no starting point for a folder of {learned}; {others} have")


def recipe_of_family(family: str, model: str | None, gpu: Gpu | None) -> StartingPoint:
    """The starting point of a run whose data are elsewhere.

    Args:
        model: its path, as of a recipe that is taken before others.
        gpu: that is to train it, where that is known.
    """
    recipes = [_recipe_of(family, [kind]) for kind in load_family(family).starting_recipes]
    found = [StartingPoint(family=family, recipe=one[1], kind=one[0]) for one in recipes if one]
    same = [start for start in found if load_config(start.recipe).config.model.path == model]
    start = replace((same or found)[0], model=model)
    return start if gpu is None else _for_card(start, [start.kind], gpu, is_given=True)


def _for_card(
    start: StartingPoint, kinds: Sequence[RecordKind], gpu: Gpu, *, is_given: bool
) -> StartingPoint:
    """The recipe for a card, and the models that fit it; unless the family was given, it is one of them."""
    card = f"the {gpu.memory_gib} GB of your {gpu.name}"
    own = recipe_for(start.recipe, gpu.comparable_gib)
    if is_given:
        remark = (
            f"with the recipe for {card}" if own else f"which has no recipe for {card}; plan shows what fits"
        )
        return replace(start, recipe=own[1] if own else start.recipe, reason=remark)
    recipes = {name: found for name in family_names() if (found := _recipe_of(name, kinds[:1]))}
    by_family = [(name, found[1]) for name, found in recipes.items()]
    models = fitting_models(by_family, gpu.comparable_gib)
    if own:
        return replace(start, recipe=own[1], fitting=models)
    # Made for the card that is most like it, or for the smallest.
    likely = models[-1:] or fitting_models(by_family, _SMALLEST_CARD_GB)[:1]
    if not likely:
        return replace(start, reason=f"although no recipe is for {card}; plan shows what fits")
    (best,) = likely
    too_small = "" if models else f", nor any other; this one is for {best.card_gb} GB, plan shows what fits"
    return StartingPoint(
        family=best.family,
        recipe=best.recipe,
        kind=recipes[best.family][0],
        reason=f"as {start.family} has no recipe for {card}{too_small}",
        fitting=models,
    )


def _learns_clips(path: Path, own: Mapping[RecordKind, str]) -> bool:
    """Whether clips are learned: there are more of them than images with captions, or, without any caption,
    that can be read; a family that takes only one of both decides.

    Args:
        own: recipes of the family that was named.
    """
    names = list_folder(path, allow_outside=False).files
    clips, images = list(filter(is_video, names)), list(filter(is_image, names))
    if not clips or not images:
        return bool(clips)
    if own and own.keys().isdisjoint(_OF_CLIPS):
        return False
    if own.keys() == {"image_to_video"}:
        return True
    # The files that are skipped are logged when the folder is read for the family.
    captioned = find_records([Source(path=str(path))], media_store=path, logs_skipped=False).records
    usable = [is_video(record.target.name) for record in captioned] or [
        isinstance(size, VideoFacts) for size in _sizes(path / name for name in (*images, *clips))
    ]
    return 2 * sum(usable) > len(usable)


def _recipe_of(name: str, kinds: Sequence[RecordKind]) -> tuple[RecordKind, str] | None:
    """The first of these kinds of data that a family has a recipe for, and the recipe."""
    family = load_family(name)
    for kind in kinds:
        if recipe := family.starting_recipes.get(kind):
            own = Path(inspect.getfile(family)).with_name(recipe)
            return kind, str(own) if own.exists() else recipe
    return None


def look_at(path: Path, start: StartingPoint, companions: Mapping[str, Sequence[Path]]) -> FolderFindings:
    """The content of a folder, as the data of a recipe.

    Args:
        companions: folders of files of the same names, by the flag that names them.
    """
    data = load_config(start.recipe).config.data
    try:
        dirs = {flag: list(map(str, folders)) for flag, folders in companions.items() if folders}
        source = Source(
            path=str(path),
            input_columns=[] if "--inputs" in dirs else data.input_columns,
            input_dirs=dirs.get("--inputs", []),
            layer_columns=[] if "--layers" in dirs else data.layer_columns,
            layer_dirs=dirs.get("--layers", []),
            inpaint_mask_dir=dirs.get("--masks", [None])[0],
        )
    except ValidationError as error:
        [first, *_] = error.errors()
        flag = _SETTINGS.get(str(first["loc"][0]) if first["loc"] else "", [str(path)])[0]
        raise UserError(f"{flag}: {first['msg'].removeprefix('Value error, ')}") from None
    found = find_records([source], media_store=path)
    images, clips = list(filter(is_image, found.names)), list(filter(is_video, found.names))
    if not images and not clips:
        hint = ""
        if source.input_columns:
            hint = "; --inputs FOLDER names images of the same names that these come from"
        if source.layer_columns:
            hint = (
                "; --layers FOLDER names their layers, of the same names: once for each, from the bottom up"
            )
        raise UserError("\n".join(found.problems) + hint)
    strays = [name for name in (*images, *clips) if not _is_learned(name, start.kind)]
    images, clips = ([name for name in names if name not in strays] for names in (images, clips))
    if not images and not clips:
        raise UserError(f"{path}: has none of what {start.family} trains on, only {join_names(strays)}")
    return FolderFindings(
        path=path,
        source=source,
        num_images=len(images),
        num_clips=len(clips),
        sizes=list(_sizes(path / name for name in (*images, *clips))),
        records=[one for one in found.records if _is_learned(one.target.name, start.kind)],
        strays=strays,
        skip_settings=settings_to_skip(
            len({*strays, *found.unread}), len(found.names), max_bad_ratio=data.max_bad_ratio
        ),
        problems=found.problems,
    )


def _is_learned(name: str, kind: RecordKind) -> bool:
    """Whether a model for this kind of data trains on a file; one for clips takes an image as a clip, too."""
    return is_video(name) if kind == "image_to_video" else is_image(name) or kind == "video"


def write_start(found: FolderFindings, start: StartingPoint, out: Path) -> Path | None:
    """Write the image that previews of clips start from, or the mask of those that regenerates parts, where
    the config names it.

    Args:
        out: the file of the config, which it lies next to.

    Returns:
        Its file, or None where none is needed.
    """
    path = _start_file(found, start, out)
    if path is None:
        return None
    if start.kind == "inpaint":
        size = check_image(found.records[0].target)
        drawn = Image.new("L", (size.width, size.height))  # its middle is white, half of each side
        box = (size.width // 4, size.height // 4, 3 * size.width // 4, 3 * size.height // 4)
        drawn.paste(255, box)
    else:
        [drawn] = read_frames(found.records[0].target, [0.0])
    try:
        with path.open("xb") as file:
            drawn.save(file, format="PNG")
    except OSError as error:
        raise UserError(f"{path}: the image that previews start from: {error.strerror}") from None
    return path


def _start_file(found: FolderFindings, start: StartingPoint, out: Path) -> Path | None:
    if not found.records:
        return None
    if start.kind == "image_to_video":
        return out.with_name(f"{out.stem}_start.png")
    needs_mask = start.kind == "inpaint" and found.source.inpaint_mask_dir is None
    return out.with_name(f"{out.stem}_mask.png") if needs_mask else None


def starting_config(
    found: FolderFindings,
    start: StartingPoint,
    *,
    out: Path,
    commands: Sequence[str],
    presets: Sequence[Preset],
) -> str:
    """The yaml of a run: what the folder asks for, on top of a recipe.

    Args:
        out: the file that it is for.
        commands: what to type next, for its head.
        presets: whose settings it gets; a later one wins.
    """
    config = load_config(start.recipe).config
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    first = _start_file(found, start, out)
    for section, key, value, why in _settings(found, config, out, first):
        lines[section][key] = setting_line(key, value, why)
    for preset in presets:
        preset.require_fit(config.model.family)
        for section, values in yaml.safe_load(preset.text).items():
            for key, value in values.items() if isinstance(values, dict) else ():
                lines[section][key] = setting_line(key, value, f"preset {preset.name}")
    recipes = sorted((find_config_file(start.recipe).parent / "cards").glob("*.yaml"))
    mark = f"\nextends: {start.recipe}\n"
    cards = ", ".join(path.name for path in recipes if mark in path.read_text(encoding="utf-8"))
    explained = if_in_clone("docs/configuration.md", "; docs/configuration.md explains every setting")
    if not any("trigger:" in line for line in lines["data"].values()):
        remark = "names what is learned; captions without it get it in front"
        lines["data"]["trigger"] = f"  # trigger: my_word  # {remark}"
    return config_text(
        f"A LoRA for {config.model.family} from {shortened(str(found.path))}: {found.summary}.",
        commands,
        remarks=["#", f"# All else is as in the recipe that it extends{explained}."],
        extends=start.recipe + (f"  # by the memory of the card: {cards}" if cards else ""),
        sections={section: list(own.values()) for section, own in lines.items()},
    )


def config_text(
    title: str,
    commands: Sequence[str],
    *,
    remarks: Sequence[str],
    extends: str,
    sections: Mapping[str, Sequence[str]],
) -> str:
    """A config that extends a recipe: what it is, what to type next, remarks, and lines of settings."""
    blocks = (line for section, own in sections.items() for line in ("", f"{section}:", *own))
    head = [schema_line(), f"# {title}", "#", *(f"#   {command}" for command in commands), *remarks]
    return "\n".join([*head, "", f"extends: {extends}", *blocks]) + "\n"


def _settings(
    found: FolderFindings, config: Config, out: Path, start: Path | None
) -> Iterator[tuple[str, str, object, str]]:
    """Section, key, value and reason of each setting.

    Args:
        out: the file of the config.
        start: image that previews of clips start from.
    """
    yield "data", "path", str(found.path), ""
    for key, (_, why, other, off) in _SETTINGS.items():
        if value := getattr(found.source, key):
            yield "data", key, value, why
            yield "data", other, off, ""
    given = CaptionReport(found.path).flag("--trigger")
    if trigger := given or _trigger([record.captions[0] for record in found.records]):
        remark = "the captions were written" if given else "every caption begins"
        yield "data", "trigger", trigger, f"{remark} with it"
    yield from (("data", *setting) for setting in _proposed_sizes(found.sizes, config))
    yield "output", "dir", f"runs/{out.stem}", "the LoRA, checkpoints, previews and logs"
    yield "model", "path", config.model.path, "a hub id, downloaded on first use, or a pipeline's folder"
    run_name = found.path.resolve().name or out.stem
    yield "logging", "run_name", run_name, "names the LoRA in its file and on its card"
    yield from (("validation", *setting) for setting in _proposed_previews(found, config, start))


def _proposed_previews(
    found: FolderFindings, config: Config, start: Path | None
) -> Iterator[tuple[str, object, str]]:
    """Prompts, and the image that each starts from where the recipe has some."""
    texts = (text for record in found.records for text in record.captions[:1])
    caption = next((text for text in texts if text.isprintable() and "${" not in text), None)
    prompts = [caption, *config.validation.prompts[-1:]] if caption else []
    if prompts or config.validation.inputs:
        yield "prompts", prompts, "a caption of yours, and one without what is learned"
    if config.validation.inputs:
        is_masked = bool(config.validation.inpaint_masks)
        starts: Sequence[Path | None] = [start]
        if found.records and (is_masked or not start):
            first = found.records[0]
            starts = [first.target] if first.layers or is_masked else first.inputs
        inputs = [str(path) for path in starts[:1] if path] * len(prompts)
        yield "inputs", inputs, "what each starts from; images that you do not train on show more"
        if is_masked:
            masks = [start, *(record.inpaint_mask for record in found.records[:1])]
            files = [str(path) for path in masks if path][:1] * len(prompts)
            yield "inpaint_masks", files, "white is what is regenerated"


def _proposed_sizes(
    sizes: Sequence[ImageFacts | VideoFacts], config: Config
) -> Iterator[tuple[str, object, str]]:
    """Settings for media that are smaller or shorter than the recipe wants."""
    data = config.data
    width, height = data.first_size
    edge = (
        max(_EDGE_STEP, isqrt(median_low(map(_area, sizes))) // _EDGE_STEP * _EDGE_STEP) if sizes else width
    )
    if data.width is None and edge < width:
        yield "resolutions", [edge], f"at least half of the images have fewer than {width} x {width} pixels"
    elif data.width is not None and any(size.width < width or size.height < height for size in sizes):
        why = f"some are smaller than {width} x {height}"
        yield "width", None, why
        yield "height", None, why
        largest = max(_EDGE_STEP, isqrt(width * height) // _EDGE_STEP * _EDGE_STEP)
        yield "resolutions", [min(edge, largest)], "as many pixels as this square, in about their own shape"
    clips = [size for size in sizes if isinstance(size, VideoFacts)]
    if clips and data.frame_counts and data.fps:
        lengths = [max_frames(clip.duration_s, data.fps) for clip in clips]
        wanted = {
            min(data.frame_counts[0], max(1, (length - 1) // _FRAME_STEP) * _FRAME_STEP + 1)
            for length in (min(lengths), max(lengths))
        }
        if wanted != set(data.frame_counts):
            why = (
                f"the shortest has {min(lengths)} frames at {data.fps:g} a second, the longest {max(lengths)}"
            )
            yield "frame_counts", sorted(wanted), why


def _trigger(captions: Sequence[str]) -> str | None:
    """The word that several captions all begin with, unless that is an ordinary one."""
    words = {found[0] if (found := re.match(r"[\w-]+", text)) else "" for text in captions}
    word = words.pop() if len(words) == 1 and len(captions) > 1 else ""
    return None if word.casefold() in _NO_TRIGGERS else word or None


def _sizes(paths: Iterator[Path]) -> Iterator[ImageFacts | VideoFacts]:
    for path in paths:
        try:
            yield check_video(path) if is_video(path.name) else check_image(path)
        except UserError:  # The doctor names those that cannot be used.
            continue


def _area(size: ImageFacts | VideoFacts) -> int:
    return size.width * size.height


def setting_line(key: str, value: object, why: str) -> str:
    """A setting as yaml, of which json is a part; a plain word needs no quotes."""
    text, below = _plain(value), ""
    if isinstance(value, list) and value and isinstance(value[0], str):
        text, below = "", "".join(f"\n    - {_plain(entry)}" for entry in value)
    return f"  {key}: {text}".rstrip() + (f"  # {why}" if why else "") + below


def _plain(value: object) -> str:
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value)
    if is_word and str(value).casefold() not in ("null", "none"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
