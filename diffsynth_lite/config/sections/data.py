"""The section ``data``: what the LoRA learns from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from diffsynth_lite.config.field_type import NotEmpty, Range
from diffsynth_lite.config.settings import Settings


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """The training images and their captions."""

    path: Annotated[str, NotEmpty()]
    """Folder of the images."""

    metadata: Annotated[str | None, NotEmpty()] = None
    """The file that names images and captions: a `.jsonl` or `.csv` inside the folder, or a path to one.
    Null takes `metadata.jsonl` or `metadata.csv` when the folder has one, and otherwise the `.txt` file
    beside each image."""

    image_column: Annotated[str, NotEmpty()] = "file_name"
    """Column of the metadata file with the image's path, relative to the folder."""

    caption_column: Annotated[str, NotEmpty()] = "text"
    """Column of the metadata file with the caption."""

    width: Annotated[int, Range(at_least=1)] = 1024
    """Width of the training images in pixels. Each image is resized until it covers width x height, then
    cropped around its centre. Families want multiples of a number of their own, such as 16."""

    height: Annotated[int, Range(at_least=1)] = 1024
    """Height of the training images in pixels; see `width`."""

    repeats: Annotated[int, Range(at_least=1)] = 1
    """How often each image occurs in one pass over the data."""

    cache_dir: Annotated[str, NotEmpty()] = ".diffsynth_cache"
    """Folder for encoded images and captions. It is shared by all runs, and can be deleted at any time: what
    is missing is encoded again."""

    on_bad_item: Literal["error", "skip"] = "error"
    """What an image that cannot be read does: stop the run before training with a list of all of them, or be
    left out and written to the run's `quarantine.jsonl`. A missing caption is an error in any case."""

    num_workers: Annotated[int, Range(at_least=0, at_most=64)] = 2
    """Processes per device that read the cache ahead and draw the noise; 0 does it in the main process. More
    help where reading files is what training waits for. The result does not depend on it."""
