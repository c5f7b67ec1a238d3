"""The section ``data``: what the LoRA learns from."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from diffsynth_lite.config.field_type import Distinct, Form, NotEmpty, Range
from diffsynth_lite.config.sections.source import SourceSettings
from diffsynth_lite.config.settings import Problem

_SIZE = Form("[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", "each as in 1024x768")
_COLOUR = Form("[A-Za-z]+|#[0-9A-Fa-f]{6}", 'such as white or "#c0c0c0"')
# What shapes buckets that are computed; where sizes are given they do nothing.
_BUCKET_SETTINGS = ("bucket_step", "max_aspect_ratio")


@dataclass(frozen=True, kw_only=True)
class DataSettings(SourceSettings):
    """What the LoRA learns from: pictures or clips with their captions, how they are cut to size, and where
    they are kept in encoded form."""

    sources: list[SourceSettings] = field(default_factory=list)
    """Several sources, learned together: a list with the settings of a source (below) in each entry, as in
    `[{path: photos}, {path: drawings, repeats: 2}]`. With it, none of these stands directly under `data`."""

    width: Annotated[int | None, Range(at_least=1)] = None
    """Width in pixels where all items get one size, given with `height`. Each is resized until it covers
    width x height, then cropped; a smaller one counts as bad, unless `upscale` is on. Families want multiples
    of a number of their own, such as 16."""

    height: Annotated[int | None, Range(at_least=1)] = None
    """Height in pixels; see `width`."""

    resolutions: Annotated[list[int], NotEmpty(), Distinct(), Range(at_least=1)] = field(
        default_factory=lambda: [1024]
    )
    """How many pixels a picture or frame has, as the edge in pixels of a square of as many. Each item keeps
    about its own shape, in a bucket of items of one size. With several, each item is learned at each of
    them."""

    sizes: Annotated[list[str], Distinct(), _SIZE] = field(default_factory=list)
    """Instead of `resolutions`: the sizes to use, such as `[1024x1024, 1216x832]`, width first, in pixels.
    Each item gets, of those that it fills, the one whose shape is nearest, or a larger one of nearly that
    shape."""

    bucket_step: Annotated[int | None, Range(at_least=1)] = None
    """Pixels between the sizes of buckets, a multiple of what the family needs. Larger makes fewer buckets
    and crops more; null chooses."""

    max_aspect_ratio: Annotated[float, Range(at_least=1)] = 2.0
    """Longest shape of a bucket, the long edge over the short one; what is longer is cropped to it."""

    upscale: bool = False
    """Enlarge items that are smaller than their bucket, or than `width` x `height`. Off, they are learned at
    a smaller size, or count as bad where there is none."""

    frame_counts: Annotated[list[int] | None, NotEmpty(), Distinct(), Range(at_least=1)] = None
    """Lengths of clips in frames; each clip gets the longest that it has enough frames for. Null takes the
    family's own."""

    fps: Annotated[float | None, Range(above=0)] = None
    """Frames per second that clips are read at, by their time stamps. Null takes the family's own."""

    clip: Literal["start", "center", "random", "uniform"] = "start"
    """Which part of a longer clip is learned: its start, its middle, parts drawn at random (the same ones in
    each run), or parts spread evenly."""

    clips_per_video: Annotated[int, Range(at_least=1)] = 1
    """Parts taken from each video, with `clip` random or uniform."""

    crop: Literal["center", "random"] = "center"
    """What is kept of an item that does not have the shape of its bucket: its middle, or a part drawn at
    random (the same one in each run)."""

    crops_per_item: Annotated[int, Range(at_least=1)] = 1
    """Crops made of each item, with `crop` random. Each is an item of its own, so a pass and the cache grow
    as many times."""

    background: Annotated[str, _COLOUR] = "white"
    """Colour behind pictures with transparency: a name, or red, green and blue in hexadecimal, in quotes."""

    caption_dropout: Annotated[float, Range(at_least=0, below=1)] = 0.0
    """Share of the samples that are learned with an empty caption. About 0.1 keeps guidance working in long
    trainings."""

    tag_shuffles: Annotated[int, Range(at_least=0)] = 0
    """For captions that are lists of tags: how many other orders of its tags each caption is learned in,
    beside the one written. Each is encoded, so the cache grows as many times."""

    tag_separator: Annotated[str, NotEmpty()] = ","
    """What stands between tags."""

    keep_tags: Annotated[int, Range(at_least=0)] = 0
    """Tags at the start of a caption that stay where they are, such as a trigger."""

    cache: bool = True
    """Encode pictures, clips and captions once, before training, into `cache_dir`. Off, they are encoded
    anew whenever they are needed: much slower, and the encoders stay in memory, but next to no space is
    taken on the disk. The result is the same."""

    cache_dir: Annotated[str, NotEmpty()] = ".diffsynth_cache"
    """Folder for encoded media and captions, and for what is known of the files. It is shared by all runs,
    and can be deleted at any time: what is missing is encoded again."""

    on_bad_item: Literal["error", "skip"] = "error"
    """What an item that cannot be used does: stop the run before training, or be left out. All of them are
    listed in the run's `quarantine.jsonl` either way. A missing caption is an error in any case."""

    max_bad_ratio: Annotated[float, Range(at_least=0, at_most=1)] = 0.1
    """Share of the items that `on_bad_item: skip` leaves out at most; with more the run stops."""

    num_workers: Annotated[int, Range(at_least=0, at_most=64)] = 2
    """Processes per device that read the cache ahead and draw the noise; 0 does it in the main process. More
    help where reading files is what training waits for. The result does not depend on it."""

    @property
    def sources_by_key(self) -> dict[str, SourceSettings]:
        """Each source by the place of its settings in the yaml: ``data`` alone, or ``data.sources[0]`` on."""
        if self.sources:
            return {f"data.sources[{place}]": source for place, source in enumerate(self.sources)}
        own = {setting.name: getattr(self, setting.name) for setting in fields(SourceSettings)}
        return {"data": SourceSettings(**own)}

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
        """Width and height that stand for all where one is needed, as for a preview."""
        return (*self.given_sizes, (self.resolutions[0], self.resolutions[0]))[0]

    def conflicts(self) -> Iterator[Problem]:
        yield from self._source_conflicts()
        yield from self._size_conflicts()
        if self.crops_per_item > 1 and self.crop != "random":
            message = f"{self.crops_per_item} crops would all be the same; set data.crop: random"
            yield Problem(("crops_per_item", "crop"), message)
        if self.clips_per_video > 1 and self.clip not in ("random", "uniform"):
            message = f"{self.clips_per_video} clips would all be the same; set data.clip: random or uniform"
            yield Problem(("clips_per_video", "clip"), message)

    def _source_conflicts(self) -> Iterator[Problem]:
        own = [setting.name for setting in fields(SourceSettings) if not self.is_default(setting.name)]
        if self.sources:
            for key in own:
                yield Problem((key,), "cannot stand beside data.sources; move it into the entries it is for")
        elif self.path is None and self.dataset is None:
            message = (
                "is required; name a folder (data.path) or a dataset (data.dataset), or list data.sources"
            )
            yield Problem(("path", "dataset"), message)
        else:
            yield from super().conflicts()

    def _size_conflicts(self) -> Iterator[Problem]:
        if (self.width is None) != (self.height is None):
            key, missing = ("height", "width") if self.width is None else ("width", "height")
            yield Problem((key, missing), f"needs data.{missing} beside it")
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
