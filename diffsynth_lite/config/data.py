"""The section ``data``: the sources that the LoRA learns from, and how their items are prepared."""

import json
import os
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from diffsynth_lite.config.settings import (
    MOST_COPIES,
    MOST_PIXELS,
    Copies,
    Distinct,
    FilePath,
    Frames,
    NonEmptyStr,
    Pixels,
    Problem,
    Settings,
)


def _require_few_pixels(size: str) -> str:
    if max(map(int, size.split("x"))) > MOST_PIXELS:
        raise ValueError(f"an edge has at most {MOST_PIXELS} pixels")
    return size


_Size: TypeAlias = Annotated[
    str,
    Field(pattern="^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$", examples=["1024x768"]),
    AfterValidator(_require_few_pixels),
]
_Colour: TypeAlias = Annotated[
    str, Field(pattern="^([A-Za-z]+|#[0-9A-Fa-f]{6})$", examples=["white", "#c0c0c0"])
]
# They shape computed buckets; where sizes are given they have no effect.
_BUCKET_SETTINGS = ("bucket_step", "max_aspect_ratio")
_MOST_OCCURRENCES = 10_000
"""Of an item in one pass; the order of a whole pass is generated at once."""
# Only for a dataset; with a folder they have no effect.
_OF_A_DATASET = ("split", "revision")


class SourceSettings(Settings):
    """One source: a folder, or a dataset. These settings are written directly under `data`, or, for several
    sources, in each entry of `data.sources`; either way `path` or `dataset` must be given."""

    path: FilePath | None = None
    """Folder of the images or clips; subfolders are read too."""

    dataset: NonEmptyStr | None = None
    """Instead of a folder: hub id or local path of a dataset that the `datasets` library loads."""

    split: NonEmptyStr = "train"
    """Part of the dataset to take, such as `train`, or `train[:100]` where it is not one that was saved to
    disk."""

    revision: NonEmptyStr | None = None
    """Branch, tag or commit of a dataset on the hub; null is its main branch. Set a commit to be sure that a
    later run gets the same data."""

    metadata: FilePath | None = None
    """The file that names media and captions: a `.jsonl`, `.csv` or `.parquet` inside the folder, or a path
    to one. Null takes `metadata.jsonl`, `metadata.csv` or `metadata.parquet` when the folder has one, and
    otherwise the `.txt` or `.caption` file next to each image or clip."""

    media_column: NonEmptyStr = "file_name"
    """Column of the metadata file or dataset with the image or clip to learn; a path is relative to the
    folder."""

    caption_columns: Distinct[NonEmptyStr] = Field(default=["text"], min_length=1)
    """Columns with captions. Where an item has several, one of them is drawn each time that it is seen."""

    input_columns: Distinct[NonEmptyStr] = Field(default=[])
    """Columns with the images that an edit starts from, for families that edit."""

    first_frame_column: NonEmptyStr | None = None
    """Column with the image that a clip starts from, for image-to-video families."""

    last_frame_column: NonEmptyStr | None = None
    """Column with the image that a clip ends with, for families that take one."""

    mask_column: NonEmptyStr | None = None
    """Column with a mask for the loss: white pixels count, black ones do not."""

    control_column: NonEmptyStr | None = None
    """Column with the control input of an item, such as its edges, depth or poses, for families that take
    one: an image for an image, and for a clip a clip of its length, which is cut, cropped and timed like
    it."""

    inpaint_mask_column: NonEmptyStr | None = None
    """Column with inpainting masks, white is regenerated, for families that fill masked parts; the mask of a
    clip may be a clip."""

    face_column: NonEmptyStr | None = None
    """Column with a clip of the face in a clip, which is cut out of it and timed like it, for families that
    animate a character."""

    layer_columns: Distinct[NonEmptyStr] = Field(default=[])
    """Columns with the layers of an image, each an image with transparency or a list of them, from the
    bottom up, for families that decompose images."""

    input_dirs: Distinct[FilePath] = Field(default=[])
    """Instead of `input_columns`: folders of the images that an edit starts from, each with the name of its
    target; their suffixes may differ."""

    first_frame_dir: FilePath | None = None
    """Instead of `first_frame_column`: a folder in which these images have the names of their clips."""

    last_frame_dir: FilePath | None = None
    """Instead of `last_frame_column`: a folder in which these images have the names of their clips."""

    mask_dir: FilePath | None = None
    """Instead of `mask_column`: a folder in which masks have the names of their images or clips."""

    control_dir: FilePath | None = None
    """Instead of `control_column`: a folder in which these images or clips have the names of their
    targets."""

    inpaint_mask_dir: FilePath | None = None
    """Instead of `inpaint_mask_column`: a folder in which these masks have the names of their targets."""

    face_dir: FilePath | None = None
    """Instead of `face_column`: a folder in which these clips have the names of their targets."""

    random_masks: int = Field(default=0, ge=0, le=MOST_COPIES)
    """Instead of files with masks: how many random inpainting masks are drawn for each crop of an item,
    the same ones in each run: rectangles, ellipses, bands along an edge, and now and then the whole image.
    Each is an item of its own, so a pass and the cache grow as many times."""

    layer_dirs: Distinct[FilePath] = Field(default=[])
    """Instead of `layer_columns`: a folder for each layer, from the bottom up, in which these have the names
    of their images."""

    repeats: int = Field(default=1, ge=1, le=_MOST_OCCURRENCES)
    """How often each item occurs in one pass over the data."""

    weight: float = Field(default=1.0, ge=1e-6, le=_MOST_OCCURRENCES)
    """Multiplies `repeats`, to balance sources finely: with 0.5 half of the items occur in each pass, and all
    of them in every two."""

    loss_weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Multiplies the loss of its samples: how much they count against those of other sources."""

    preserve: bool = False
    """Do not learn these items (prior preservation): on them the model should stay as it is without the LoRA;
    the base model's prediction is their target. Use it with sources that are learned; it may be the same
    folder with other captions. It keeps a LoRA from changing more than it should."""

    trigger: NonEmptyStr | None = None
    """Word or words that every caption should have, such as `ohwx dog`; they are put in front of a caption
    without them, with a comma."""

    captions: Literal["required", "optional", "none"] = "required"
    """Whether each item must have a caption (`required`). Where one has none, `optional` takes only the
    `trigger`; `none` uses it for all items and ignores their captions. With `preserve`, `none` without
    a `trigger` is the empty caption."""

    allow_outside: bool = False
    """Follow absolute paths, `..` and links that lead out of the folder. Off, they are refused: turn it on
    only for data that you trust."""

    def conflicts(self) -> Iterator[Problem]:
        if self.path is None and self.dataset is None:
            yield Problem(("path", "dataset"), "is required; name the folder of the data, or a dataset")
        if self.path is not None and self.dataset is not None:
            message = (
                "a source is either a folder (path) or a dataset; keep one, or list both in data.sources"
            )
            yield Problem(("dataset", "path"), message)
        if self.repeats * self.weight > _MOST_OCCURRENCES:
            message = (
                f"{self.weight:g} times the repeats, {self.repeats}, is more often than the "
                f"{_MOST_OCCURRENCES} times that an item may occur in one pass; lower one of them"
            )
            yield Problem(("weight", "repeats"), message)
        if self.captions == "none" and self.trigger is None and not self.preserve:
            message = "none needs a trigger, which is then the caption of all items"
            yield Problem(("captions", "trigger"), message)
        pairs = self._columns_of_folders()
        of_a_folder = ("metadata", *pairs)
        foreign, owner = (_OF_A_DATASET, "dataset") if self.dataset is None else (of_a_folder, "path")
        for key in foreign:
            if not self.is_default(key):
                yield Problem((key,), f"has no effect without {owner}; remove it")
        for folders, columns in pairs.items():
            if getattr(self, columns) and getattr(self, folders):
                yield Problem((folders, columns), f"{columns} sets the same; keep one of them")

        if self.random_masks and (self.inpaint_mask_column or self.inpaint_mask_dir):
            message = "has no effect where files have the masks; keep one of them"
            yield Problem(("random_masks", "inpaint_mask_dir", "inpaint_mask_column"), message)

    @classmethod
    def _columns_of_folders(cls) -> dict[str, str]:
        """The settings with folders of files that belong to the targets, and those with columns of them."""
        ends = {"_dirs": "_columns", "_dir": "_column"}
        return {
            key: key.removesuffix(end) + column
            for key in SourceSettings.model_fields
            for end, column in ends.items()
            if key.endswith(end)
        }


class DataSettings(SourceSettings):
    """The training data: images or clips with their captions, how they are resized and cropped, and where
    their encodings are cached."""

    sources: list[SourceSettings] = Field(default=[])
    """Several sources, learned together: a list with the settings of a source (below) in each entry, as in
    `[{path: photos}, {path: drawings, repeats: 2}]`. With it, none of these may be set directly under
    `data`."""

    hold_out: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the images or clips of each source that is kept out of training, with all their crops and
    captions, for the fixed-noise loss: about so many, but at least one, and never all. `validation.seed` and
    the content of the files decide which, so that most stay the same where items are added; files of equal
    content stay together. Sources with `preserve` give none. Use it instead of `validation.data`; the run's
    `held_out.jsonl` lists them. 0 trains on all."""

    width: Pixels | None = None
    """Width in pixels where all items get one size, given with `height`. Each is resized until it covers
    width x height, then cropped; a smaller one counts as bad, unless `upscale` is on. Families want multiples
    of a number of their own, such as 16."""

    height: Pixels | None = None
    """Height in pixels; see `width`."""

    resolutions: Distinct[Pixels] = Field(default=[1024], min_length=1)
    """Pixels of an image or frame, given as the edge of a square with as many pixels. Each item keeps about
    its own aspect ratio, in a bucket of items of one size. With several, each item is learned at each of
    them."""

    sizes: Distinct[_Size] = Field(default=[])
    """Instead of `resolutions`: the sizes to use, such as `[1024x1024, 1216x832]`, width first, in pixels.
    Each item gets the size with the nearest aspect ratio among those that it fills, or a larger one of nearly
    that ratio."""

    bucket_step: Pixels | None = None
    """Pixels between the sizes of buckets, a multiple of the family's own step. Larger makes fewer buckets
    and crops more; null chooses."""

    max_aspect_ratio: float = Field(default=2.0, ge=1, le=1000)
    """Largest aspect ratio of a bucket, the long edge over the short one; longer items are cropped to it."""

    upscale: bool = False
    """Enlarge items that are smaller than their bucket, or than `width` x `height`. Off, they are learned at
    a smaller size, or count as bad where there is none."""

    frame_counts: Distinct[Frames] | None = Field(default=None, min_length=1)
    """Lengths of clips in frames; each clip gets the longest that it has enough frames for. Null takes the
    family's own."""

    fps: float | None = Field(default=None, ge=0.001, le=1000)
    """Frames per second that clips are read at, by their time stamps. Null takes the family's own."""

    audio: bool = False
    """Learn clips with their audio, by families whose model makes both; previews then have audio, too. Off,
    audio in the files is ignored, and the model is trained on frames only."""

    silent_clips: Literal["ignore", "learn"] = "ignore"
    """How a clip without audio is treated with `audio`: the model gets silence with it either way; the error
    of the audio is ignored (`ignore`), or counts (`learn`), so that the model learns that such clips are
    silent."""

    control_downscale: int = Field(default=1, ge=1, le=16)
    """Pixels of an item to one of its control, on each axis, for families that take smaller controls: at 2
    the model sees a control of half the width and height, of a quarter of the tokens. Previews have the
    same, and so must programs that use the LoRA."""

    clip: Literal["start", "center", "random", "uniform"] = "start"
    """Which part of a longer clip is learned: its start, its middle, parts drawn at random (the same ones in
    each run), or parts spread evenly."""

    clips_per_video: Copies = 1
    """Parts taken from each video, with `clip` random or uniform."""

    crop: Literal["center", "random"] = "center"
    """Which part is kept of an item that does not have the shape of its bucket: its middle, or a part drawn
    at random (the same one in each run)."""

    crops_per_item: Copies = 1
    """Crops made of each item, with `crop` random. Each is an item of its own, so a pass and the cache grow
    as many times."""

    background: _Colour = "white"
    """Background colour of images with transparency: a name, or red, green and blue in hexadecimal, in
    quotes."""

    caption_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples that are learned with an empty caption. About 0.1 keeps guidance working in long
    trainings."""

    tag_shuffles: int = Field(default=0, ge=0, le=MOST_COPIES)
    """For captions that are lists of tags: how many other orders of its tags each caption is learned in, in
    addition to the written one. Each is encoded, so the cache grows as many times."""

    tag_separator: NonEmptyStr = ","
    """Separator between tags."""

    keep_tags: int = Field(default=0, ge=0, le=10_000)
    """Tags at the start of a caption that stay where they are, such as a trigger."""

    cache: bool = True
    """Encode images, clips and captions once, before training, into `cache_dir`. Off, they are encoded again
    whenever they are needed: much slower, and the encoders stay in memory, but almost no disk space is used.
    The result is the same."""

    cache_dir: FilePath = ".diffsynth_cache"
    """Folder for encoded media and captions, and for facts about the files. It is shared by all runs, and can
    be deleted at any time: missing entries are encoded again."""

    sealed: FilePath | None = None
    """Folder, or URI on object storage such as `s3://bucket/folder`, of a sealed cache: `diffsynth-lite cache
    seal` writes it from the filled cache, and a run then reads neither media nor entries of `cache_dir`. For
    data of a million items and more; the result is the same. Needs `pip install 'diffsynth_lite[lance]'`."""

    on_bad_item: Literal["error", "skip"] = "error"
    """How an item that cannot be used is treated: it stops the run before training, or is left out. All of
    them are listed in the run's `quarantine.jsonl` either way, also items whose caption or row cannot be
    read."""

    max_bad_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the items that `on_bad_item: skip` leaves out at most; with more the run stops."""

    num_workers: int = Field(default=2, ge=0, le=64)
    """Processes per device that read the cache ahead and draw the noise; 0 does it in the main process. More
    help where training waits for files to be read. The result does not depend on it."""

    @property
    def sources_by_key(self) -> dict[str, SourceSettings]:
        """Each source by the place of its settings in the yaml: ``data``, or ``data.sources[0]`` ...

        Empty where a slider learns from prompts only.
        """
        if self.sources:
            return {f"data.sources[{place}]": source for place, source in enumerate(self.sources)}
        if self.path is None and self.dataset is None:
            return {}
        own = {key: getattr(self, key) for key in SourceSettings.model_fields}
        return {"data": SourceSettings(**own)}

    @property
    def names_controls(self) -> bool:
        """Whether the items of a source have controls."""
        return any(one.control_dir or one.control_column for one in self.sources_by_key.values())

    @property
    def held_out_key(self) -> str:
        """Place of the source as which ``validation.data`` is read: the first one that is learned."""
        return next(key for key, source in self.sources_by_key.items() if not source.preserve)

    @property
    def given_sizes(self) -> list[tuple[int, int]]:
        """Width and height of every size there may be; empty where ``resolutions`` decide."""
        if self.width is not None and self.height is not None:
            return [(self.width, self.height)]
        return [
            (int(width), int(height)) for width, _, height in (size.partition("x") for size in self.sizes)
        ]

    @property
    def first_size(self) -> tuple[int, int]:
        """The size used where a single one is needed, as for a preview."""
        return (*self.given_sizes, (self.resolutions[0], self.resolutions[0]))[0]

    def conflicts(self) -> Iterator[Problem]:
        yield from self._source_conflicts()
        yield from self._size_conflicts()
        if self.sealed is not None and not self.cache:
            message = "has no effect with data.cache: false, which encodes while training; remove one of them"
            yield Problem(("sealed", "cache"), message)
        if self.crops_per_item > 1 and self.crop != "random":
            message = f"{self.crops_per_item} crops would all be the same; set data.crop: random"
            yield Problem(("crops_per_item", "crop"), message)
        if self.clips_per_video > 1 and self.clip not in ("random", "uniform"):
            message = f"{self.clips_per_video} clips would all be the same; set data.clip: random or uniform"
            yield Problem(("clips_per_video", "clip"), message)

    def _source_conflicts(self) -> Iterator[Problem]:
        own = [key for key in SourceSettings.model_fields if not self.is_default(key)]
        if self.sources:
            for key in own:
                default = json.dumps(self.defaults()[key])
                message = (
                    "has no effect with data.sources; move it into the entries it is for, or, where an "
                    f"extended file sets it, undo that: data: {{{key}: {default}}}"
                )
                yield Problem((key,), message)
            yield from self._repeated_sources()
            yield from self._roles_without_effect()
        elif self.sources_by_key:
            yield from super().conflicts()
            yield from self._roles_without_effect()

    def _roles_without_effect(self) -> Iterator[Problem]:
        """Settings that relate sources to each other, where they have no effect."""
        own = list(self.sources_by_key.values())
        place = "sources[0]." if self.sources else ""
        if all(source.preserve for source in own):
            message = "leaves nothing to learn; list a source to learn next to it, in data.sources"
            yield Problem((f"{place}preserve",), message)
        weights = {source.loss_weight for source in own}
        if len(weights) == 1 and weights != {1.0}:
            message = (
                f"{own[0].loss_weight:g} for all that is learned has no effect on what counts more; set "
                "train.learning_rate to learn faster or slower"
            )
            yield Problem((f"{place}loss_weight",), message)

    def _repeated_sources(self) -> Iterator[Problem]:
        """Sources that are an earlier one, but for how often its items occur, and how much they count."""
        seen: dict[str, int] = {}
        for place, source in enumerate(self.sources):
            path = None if source.path is None else os.path.normpath(source.path)
            same = repr({**source.model_dump(exclude={"repeats", "weight", "loss_weight"}), "path": path})
            if same in seen:
                message = f"is data.sources[{seen[same]}] again; keep one, and set its repeats or weight"
                yield Problem((f"sources[{place}].{'dataset' if path is None else 'path'}",), message)
            seen.setdefault(same, place)

    def _size_conflicts(self) -> Iterator[Problem]:
        if (self.width is None) != (self.height is None):
            key, missing = ("height", "width") if self.width is None else ("width", "height")
            yield Problem((key, missing), f"needs data.{missing} next to it")
        is_fixed = self.width is not None or self.height is not None
        ways = {
            "width": is_fixed,
            "sizes": bool(self.sizes),
            "resolutions": not self.is_default("resolutions"),
        }
        given = [key for key, is_given in ways.items() if is_given]
        if len(given) > 1:
            names = " and ".join(f"data.{key}" for key in given).replace("data.width", "data.width x height")
            yield Problem(tuple(reversed(given)), f"{names} exclude each other; keep one of them")
        for key in _BUCKET_SETTINGS if is_fixed or self.sizes else ():
            if not self.is_default(key):
                message = f"has no effect with data.{given[0]}, which gives the sizes; remove it"
                yield Problem((key, given[0]), message)
