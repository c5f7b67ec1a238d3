"""This file turns the settings of the data into values for the code that reads, plans and encodes it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from PIL import ImageColor

from diffsynth_lite.config import Config
from diffsynth_lite.data.buckets import Bucket, BucketRule
from diffsynth_lite.data.captions import tag_variants
from diffsynth_lite.data.media_index import FileMemory, PartMemory
from diffsynth_lite.data.plan import PlanRules, refuse_other_kinds
from diffsynth_lite.data.records import ROLES, WHOLE, Part, Record, Source
from diffsynth_lite.data.sources import FoundRecords, find_records
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, WithAudio

_STEPS_OF_A_RESOLUTION = 16
"""Steps between buckets in an edge by default: 64 pixels at 1024."""


def set_learned(config: Config, family: ModelFamily) -> None:
    """Have the family learn and generate clips with the audio and the controls that the config asks for."""
    if config.data.audio and not isinstance(family, WithAudio):
        raise UserError(
            f"data.audio: true, but the model of {config.model.family} makes no audio; set it to false, or "
            "choose a family that makes clips with audio (docs/models.md)"
        )
    downscale = config.data.control_downscale
    if downscale != 1 and not family.takes_small_controls:
        raise UserError(
            f"data.control_downscale: {downscale}, but {config.model.family} takes no controls that are "
            "smaller than what they guide; set it to 1"
        )
    family.with_audio, family.with_controls = config.data.audio, config.data.names_controls
    family.control_downscale = downscale


def _learns_audio(family: ModelFamily) -> TypeGuard[WithAudio]:
    return family.with_audio


def plan_rules(config: Config, family: ModelFamily) -> PlanRules:
    """The part of each training record that is trained on; the family decides settings that are not given."""
    data = config.data
    family.check_trained()
    _require_colour(data.background)
    for size in data.given_sizes:
        family.check_size(*size, keys="data.sizes" if data.sizes else "data.width, data.height")
    _require_positions(config, family)
    frame_counts = frame_counts_of(config, family)
    for count in frame_counts:
        family.check_frames(count, key="data.frame_counts")
    if family.frame_step is None:
        for key in ("fps", "clip", "clips_per_video"):
            if not data.is_default(key):
                raise UserError(f"data.{key}: has no effect, as this family makes images; remove it")
    if family.with_audio and fps_of(config, family) is None:
        raise UserError("data.audio: true needs data.fps, so that clips of as many frames last as long")
    for count in frame_counts:
        audio_shape(config, family, count)  # raises where a clip is too short for its audio
    has_inputs = any(source.input_columns or source.input_dirs for source in data.sources_by_key.values())
    if data.crop == "random" and has_inputs:
        raise UserError(
            "data.crop: random crops the result of an edit and not the images that it starts from, so that "
            "the two would no longer fit; set data.crop: center"
        )
    return PlanRules(
        buckets=_bucket_rule(config, family, frame_counts),
        crop=data.crop,
        crops_per_item=data.crops_per_item,
        clip=data.clip,
        clips_per_video=data.clips_per_video,
        fps=fps_of(config, family),
        background=data.background,
        input_size=family.edits.input_size,
        check_caption=family.check_prompt,
        max_inputs=family.edits.max_inputs,
        audio=family.audio_format if _learns_audio(family) else None,
    )


def held_out_rules(rules: PlanRules) -> PlanRules:
    """The part of each held-out record that is measured: its middle, once."""
    return dataclasses.replace(rules, crop="center", crops_per_item=1, clip="center", clips_per_video=1)


def frame_counts_of(config: Config, family: ModelFamily) -> tuple[int, ...]:
    """Frames that clips may have."""
    return tuple(config.data.frame_counts or (family.default_num_frames,))


def num_preview_frames(config: Config, family: ModelFamily) -> int:
    """Frames of a preview; 1 is an image."""
    return config.validation.num_frames or max(frame_counts_of(config, family))


def num_layers_of(config: Config, family: ModelFamily) -> int:
    """Layers that the config names for an image, else the family's default; 0 in most families."""
    if not family.default_num_layers:
        return 0
    named = [
        len(source.layer_dirs) or len(source.layer_columns) for source in config.data.sources_by_key.values()
    ]
    # One column may hold lists, whose length only the data show.
    return max(named) if max(named) > 1 else family.default_num_layers


def num_preview_layers(config: Config, family: ModelFamily) -> int:
    """Layers of a preview; 0 in families that generate none."""
    return config.validation.num_layers or num_layers_of(config, family)


def check_slider(config: Config, family: ModelFamily) -> None:
    """Check that a family can train a slider: it generates images from only a prompt."""
    if config.objective.slider is None:
        return
    if "image" not in family.record_kinds:
        raise UserError(
            f"objective.slider: {config.model.family} generates no images from only a prompt, which a slider "
            "is learned on; choose another model.family"
        )
    if num_preview_frames(config, family) > 1:
        raise UserError(
            "objective.slider: is learned on images, and shown as images; set data.frame_counts: [1] and "
            "validation.num_frames: 1"
        )
    for prompt in (*config.objective.slider.prompts, *config.objective.slider.kept):
        family.check_prompt(prompt, "objective.slider")


def check_records(records: Sequence[Record], family: ModelFamily) -> None:
    """Check, by the files that the records name, that the family can train on them."""
    refuse_other_kinds(records, family.record_kinds)
    _check_faces(records, family)
    if not family.takes_last_frames and (ending := [record for record in records if record.last_frame]):
        raise UserError(
            f"data: {len(ending)} clips, such as {ending[0].name}, end with an image, and this model only "
            "starts them from one; leave last_frame_dir and last_frame_column out, or choose a model that "
            "is led to a last frame (docs/models.md)"
        )


def _check_faces(records: Sequence[Record], family: ModelFamily) -> None:
    """Check that each record has a face and a control where the family takes them, and no face elsewhere."""
    others = [record for record in records if bool(record.face) != family.takes_faces]
    if others and not family.takes_faces:
        raise UserError(
            f"data: {len(others)} clips, such as {others[0].name}, have a face, and this family takes none; "
            "leave face_dir and face_column out, or choose another model.family"
        )
    others += [record for record in records if family.takes_faces and record.control is None]
    if others:
        raise UserError(
            f"data: {len(others)} items, such as {others[0].name}, have no face or no control, and this "
            "family needs both: name them (control_dir or control_column, and face_dir or face_column)"
        )


def fps_of(config: Config, family: ModelFamily) -> float | None:
    """Frames per second at which clips are read and shown; None where each has its own, or there are none."""
    return config.data.fps or family.default_fps


def audio_shape(config: Config, family: ModelFamily, num_frames: int) -> tuple[int, ...] | None:
    """Shape of the latents of the audio that is learned with media of this length; None where none is."""
    fps = fps_of(config, family)
    return family.audio_latents_shape(num_frames, fps) if _learns_audio(family) and fps is not None else None


def own_audio_shape(config: Config, family: ModelFamily, num_frames: int) -> tuple[int, ...] | None:
    """As :func:`audio_shape`; None also where audio has the noise levels of its clip."""
    return audio_shape(config, family, num_frames) if config.objective.audio_noise == "own" else None


def check_sizes(buckets: Iterable[Bucket], family: ModelFamily) -> None:
    """Check the sizes that the data come to, of which a resolution is only the largest area."""
    for bucket in buckets:
        keys = "data.resolutions and data.max_aspect_ratio"
        family.check_size(bucket.width, bucket.height, keys=keys)


def num_tokens_of(bucket: Bucket, family: ModelFamily) -> int:
    """Tokens that the transformer makes of one sample of a bucket, with all that it is given."""
    frames = [(bucket.width, bucket.height, bucket.num_images), *((*size, 1) for size in bucket.inputs)]
    shapes = [family.latents_shape(*shape) for shape in frames]
    return sum(map(family.num_tokens, shapes)) + family.num_given_tokens(shapes[0])


def sizes_of(config: Config, family: ModelFamily) -> list[Bucket]:
    """The sizes that the config names; of a resolution its square, and one of half its edge."""
    data, divisor = config.data, family.size_divisor
    edges = [edge // part for edge in data.resolutions for part in (1, 2)]
    squares = [2 * (max(divisor, edge // divisor * divisor),) for edge in edges]
    return [
        Bucket(width=width, height=height, num_frames=num_frames, num_layers=num_layers_of(config, family))
        for width, height in data.given_sizes or squares
        for num_frames in frame_counts_of(config, family)
    ]


def shifts_by_size(
    config: Config, family: ModelFamily, shift: Callable[[Sequence[int]], float]
) -> dict[str, float]:
    """The shift of the noise levels at each size that the config names, by the name of the size.

    Of a resolution at its square and at one of half its edge: a single one does not show whether the shift
    depends on the size. Where audio has noise levels of its own, also its shift at each number of frames.

    Args:
        shift: of the shape of one sample's latents, or of those of its audio.
    """
    shapes: dict[str, Sequence[int]] = {
        size.name: family.latents_shape(size.width, size.height, size.num_images)
        for size in sizes_of(config, family)
    }
    for count in frame_counts_of(config, family):
        if (shape := own_audio_shape(config, family, count)) is not None:
            shapes[f"audio of {count} frames"] = shape
    return {name: shift(shape) for name, shape in shapes.items()}


def data_sources(config: Config) -> list[Source]:
    """The sources of the training data; a slider looks at no captions."""
    own = {} if config.objective.slider is None else {"captions": "none", "trigger": "slider"}
    return [Source(**{**dict(settings), **own}) for settings in config.data.sources_by_key.values()]


def learned_sources(config: Config) -> set[int]:
    """Indices of the sources that are learned, and not preserved."""
    return {place for place, source in enumerate(data_sources(config)) if not source.preserve}


def find_training_records(config: Config, part: Part = WHOLE) -> FoundRecords:
    """The records of all sources, or a part of them, with their captions in all orders that are trained on.

    Errors name the key and the files.
    """
    key = "data.sources" if config.data.sources else "data.dataset" if config.data.dataset else "data.path"
    found = _find(key, data_sources(config), config, part)
    records = [dataclasses.replace(record, captions=_captions(record, config)) for record in found.records]
    return dataclasses.replace(found, records=records)


def find_held_out_records(config: Config) -> FoundRecords | None:
    """The records of ``validation.data``, read as the first source that is learned; None without it."""
    if config.validation.data is None:
        return None
    return _find("validation.data", [_held_out_source(config, config.validation.data)], config, WHOLE)


def _held_out_source(config: Config, path: str) -> Source:
    first = Source(**dict(config.data.sources_by_key[config.data.held_out_key]))
    held_out: dict[str, Any] = {"path": path, "dataset": None, "metadata": None, "repeats": 1, "weight": 1.0}
    held_out["random_masks"] = min(1, first.random_masks)
    for role in ROLES:
        folders = [str(_moved(folder, first, Path(path).expanduser())) for folder in first.dirs_of(role)]
        held_out[role.folder] = folders if role.is_several else next(iter(folders), None)
    return first.model_copy(update=held_out)


def _moved(place: Path, first: Source, held_out: Path) -> Path:
    """Where a folder inside the first source is in the held-out folder."""
    root = (first.folder or Path()).resolve()
    if not place.resolve().is_relative_to(root):
        raise UserError(
            f"validation.data: {place} belongs to the training items; move it into {first.path}, and that of "
            f"the held-out items to the same place in {held_out}, or name the files in metadata"
        )
    return held_out / place.resolve().relative_to(root)


def cache_folder(config: Config) -> Path:
    """Folder of the cache and of the memory of files."""
    return Path(config.data.cache_dir).expanduser()


def sealed_folder(config: Config) -> Path:
    """Folder for this machine's copies of the tables of sealed caches."""
    return cache_folder(config) / "sealed"


def orders_folder(config: Config) -> Path:
    """Folder for the long orders of samples that this machine has shuffled."""
    return cache_folder(config) / "orders"


def index_file(folder: Path) -> Path:
    """The file in the cache's folder that remembers what files hold."""
    return folder / "index.sqlite"


def open_memory(config: Config, part: Part = WHOLE) -> FileMemory:
    """The memory of the run's files; a part of an encoding job writes to files of its own."""
    index = index_file(cache_folder(config))
    return FileMemory(index) if part.is_whole else PartMemory(index, part)


def _require_positions(config: Config, family: ModelFamily) -> None:
    """Check that no size of a resolution has a side of more than ``max_side`` pixels."""
    edge, ratio = max(config.data.resolutions, default=0), config.data.max_aspect_ratio
    if family.max_side is None or config.data.given_sizes or edge * math.sqrt(ratio) <= family.max_side:
        return
    fit = math.floor(100 * (family.max_side / edge) ** 2) / 100
    do = f"data.max_aspect_ratio: {fit}" if fit >= 1 else f"data.resolutions: [{family.max_side}]"
    raise UserError(
        f"data.max_aspect_ratio: {ratio:g}, with data.resolutions: [{edge}], makes sides of "
        f"{edge * math.sqrt(ratio):.0f} pixels, and this model has position embeddings for at most "
        f"{family.max_side}; set {do}"
    )


def _bucket_rule(config: Config, family: ModelFamily, frame_counts: tuple[int, ...]) -> BucketRule:
    data, divisor = config.data, family.size_divisor
    chosen = min(data.resolutions) // _STEPS_OF_A_RESOLUTION // divisor * divisor
    try:
        return BucketRule(
            divisor=divisor,
            step=divisor if data.given_sizes else data.bucket_step or max(divisor, chosen),
            resolutions=() if data.given_sizes else tuple(data.resolutions),
            sizes=tuple(data.given_sizes),
            max_aspect_ratio=data.max_aspect_ratio,
            frame_counts=frame_counts,
            upscale=data.upscale,
        )
    except UserError as error:
        raise UserError(f"data: {error}") from None


def _require_colour(name: str) -> None:
    try:
        ImageColor.getrgb(name)
    except ValueError:
        raise UserError(
            f"data.background: {name!r} is not a colour; give a name such as white, or #rrggbb"
        ) from None


def _captions(record: Record, config: Config) -> tuple[str, ...]:
    data = config.data
    if config.objective.slider is not None:
        return config.objective.slider.prompts
    variants = (
        tag_variants(
            caption,
            count=data.tag_shuffles + 1,
            separator=data.tag_separator,
            keep=data.keep_tags,
        )
        for caption in record.captions
    )
    return tuple(dict.fromkeys(text for texts in variants for text in texts))


def _find(key: str, sources: Sequence[Source], config: Config, part: Part) -> FoundRecords:
    store = cache_folder(config) / "media"
    found = find_records(
        sources,
        media_store=store,
        on_bad_item=config.data.on_bad_item,
        part=part,
        are_entries=bool(config.data.sources),
    )
    tables = tuple(f"{source.metadata_file}: " for source in sources if source.metadata is not None)
    # Several sources have one key, and so have the held-out items.
    table_key = "data.metadata" if key == "data.path" else key
    for lines in (found.problems, found.about_items):
        lines[:] = [f"{table_key if line.startswith(tables) else key}: {line}" for line in lines]
    return found
