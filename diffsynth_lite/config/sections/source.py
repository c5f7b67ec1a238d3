"""The entries of ``data.sources``: where one part of the data is, and how it is read."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from diffsynth_lite.config.field_type import Distinct, NoEmptyEntry, NotEmpty, Range
from diffsynth_lite.config.settings import Problem, Settings

_ROLES = ("first_frame", "last_frame", "mask")
# What goes with a folder, and what with a dataset; of the other one it would do nothing.
_OF_A_FOLDER = ("metadata", "input_dirs", *(f"{role}_dir" for role in _ROLES))
_OF_A_DATASET = ("split", "revision")


@dataclass(frozen=True, kw_only=True)
class SourceSettings(Settings):
    """One source: a folder, or a dataset. These settings stand directly under `data`, or, for several
    sources, in each entry of `data.sources`; either way `path` or `dataset` must be given."""

    path: Annotated[str | None, NotEmpty()] = None
    """Folder of the pictures or clips; subfolders are read too."""

    dataset: Annotated[str | None, NotEmpty()] = None
    """Instead of a folder: hub id or local path of a dataset that the `datasets` library loads."""

    split: Annotated[str, NotEmpty()] = "train"
    """Part of the dataset to take, such as `train`, or `train[:100]` where it is not one that was saved to
    disk."""

    revision: Annotated[str | None, NotEmpty()] = None
    """Branch, tag or commit of a dataset on the hub; null is its main branch. Set a commit to be sure that a
    later run gets the same data."""

    metadata: Annotated[str | None, NotEmpty()] = None
    """The file that names media and captions: a `.jsonl`, `.csv` or `.parquet` inside the folder, or a path
    to one. Null takes `metadata.jsonl`, `metadata.csv` or `metadata.parquet` when the folder has one, and
    otherwise the `.txt` file beside each picture or clip."""

    media_column: Annotated[str, NotEmpty()] = "file_name"
    """Column of the metadata file or dataset with the picture or clip to learn; a path is relative to the
    folder."""

    caption_columns: Annotated[list[str], NotEmpty(), Distinct()] = field(default_factory=lambda: ["text"])
    """Columns with captions. Where an item has several, each time that it is seen one of them is drawn."""

    input_columns: Annotated[list[str], NoEmptyEntry(), Distinct()] = field(default_factory=list)
    """Columns with the pictures that an edit starts from, for families that edit."""

    first_frame_column: Annotated[str | None, NotEmpty()] = None
    """Column with the picture that a clip starts from, for image-to-video families."""

    last_frame_column: Annotated[str | None, NotEmpty()] = None
    """Column with the picture that a clip ends with, for families that take one."""

    mask_column: Annotated[str | None, NotEmpty()] = None
    """Column with a picture of what counts in the loss: white does, black does not."""

    input_dirs: Annotated[list[str], NoEmptyEntry(), Distinct()] = field(default_factory=list)
    """Instead of `input_columns`: folders in which the pictures that an edit starts from have the names of
    what they become; their suffixes may differ."""

    first_frame_dir: Annotated[str | None, NotEmpty()] = None
    """Instead of `first_frame_column`: a folder in which these pictures have the names of their clips."""

    last_frame_dir: Annotated[str | None, NotEmpty()] = None
    """Instead of `last_frame_column`: a folder in which these pictures have the names of their clips."""

    mask_dir: Annotated[str | None, NotEmpty()] = None
    """Instead of `mask_column`: a folder in which masks have the names of their pictures or clips."""

    repeats: Annotated[int, Range(at_least=1)] = 1
    """How often each item occurs in one pass over the data."""

    weight: Annotated[float, Range(above=0)] = 1.0
    """Multiplies `repeats`, to balance sources finely: with 0.5 half of the items occur in each pass, and all
    of them in every two."""

    trigger: Annotated[str | None, NotEmpty()] = None
    """Word or words that every caption shall hold, such as `ohwx dog`; a caption without them gets them in
    front, with a comma."""

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
        foreign, owner = (_OF_A_DATASET, "dataset") if self.dataset is None else (_OF_A_FOLDER, "path")
        for key in foreign:
            if not self.is_default(key):
                yield Problem((key,), f"has no effect without {owner}; remove it")
        for columns, folders in (
            ("input_columns", "input_dirs"),
            *((f"{role}_column", f"{role}_dir") for role in _ROLES),
        ):
            if getattr(self, columns) and getattr(self, folders):
                yield Problem((folders, columns), f"{columns} says the same; keep one of them")
