"""This file reads a folder of images and captions into a list of records, or says all that is wrong."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from diffsynth_lite.data.images import IMAGE_SUFFIXES
from diffsynth_lite.data.listing import listed
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One image and its caption."""

    name: str
    """Path of the image relative to the data folder, with forward slashes."""

    image: Path
    caption: str


def read_records(
    folder: Path, *, metadata: Path | None, image_column: str, caption_column: str
) -> list[Record]:
    """Records of all images in ``folder`` and its subfolders, in the order of their names.

    Captions stand in ``<stem>.txt`` beside each image, or in one metadata file. Hidden files and folders
    are not read. No file is decoded here.

    Args:
        folder: folder of the images; paths in the metadata are relative to it.
        metadata: a .jsonl or .csv file; None takes the folder's ``metadata.jsonl`` or ``.csv``, if any.
        image_column: column of the metadata that holds the path of the image.
        caption_column: column of the metadata that holds the caption.

    Raises:
        UserError: no images, or captions that are missing, empty, unreadable, doubled or without image.
    """
    files = _files_in(folder)
    images = [name for name in files if _suffix(name) in IMAGE_SUFFIXES]
    if not images:
        raise UserError(
            f"{folder}: no images among its {len(files)} files; "
            f"{', '.join(IMAGE_SUFFIXES)} are read, also in subfolders"
        )
    texts = {_stem(name): name for name in files if _suffix(name) == ".txt"}
    metadata = metadata or _metadata_in(folder, files, has_texts=any(_stem(name) in texts for name in images))
    if metadata is None:
        captions = _captions_beside(folder, images, texts)
    else:
        # Imported here, because `datasets` takes a second to import and most folders need none of it.
        from diffsynth_lite.data.metadata import read_metadata_captions

        captions = read_metadata_captions(
            metadata, images, image_column=image_column, caption_column=caption_column
        )
        _warn_of_images_without_row(images, captions, metadata)
    names = [name for name in images if name in captions]
    _refuse_links_out(folder, names)
    return [Record(name=name, image=folder / name, caption=captions[name]) for name in names]


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _files_in(folder: Path) -> list[str]:
    """Sorted relative names of the files below ``folder`` that are not hidden."""
    if not folder.exists():
        raise UserError(f"{folder}: no such folder; give a folder that holds images and their captions")
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; give the folder that holds the images")

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    files, links = [], []
    for current, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        here = Path(current)
        links += [
            (here / name).relative_to(folder).as_posix() for name in subfolders if (here / name).is_symlink()
        ]
        files += [(here / name).relative_to(folder).as_posix() for name in names if not name.startswith(".")]
    if links:
        logger.warning("%s: %d linked folders are not read: %s", folder, len(links), listed(sorted(links)))
    return sorted(files)


def _metadata_in(folder: Path, files: Sequence[str], *, has_texts: bool) -> Path | None:
    """Metadata file of the folder, or None where the captions stand beside the images."""
    found = [name for name in ("metadata.jsonl", "metadata.csv") if name in files]
    sources = [*found, *(["caption files beside the images"] if has_texts else [])]
    if found and len(sources) > 1:
        raise UserError(
            f"{folder}: holds {' and '.join(sources)}; name the metadata file that is meant, or keep only one"
        )
    return folder / found[0] if found else None


def _captions_beside(folder: Path, images: Sequence[str], texts: Mapping[str, str]) -> dict[str, str]:
    """Caption of each image from the text file of the same name."""
    stems = {_stem(name) for name in images}
    _refuse_links_out(folder, [text for stem, text in texts.items() if stem in stems])
    captions: dict[str, str] = {}
    problems: list[str] = []
    for name in images:
        text = texts.get(_stem(name))
        if text is None:
            problems.append(f"{name}: no {_stem(name)}.txt")
            continue
        try:
            captions[name] = (folder / text).read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError:
            problems.append(f"{text}: not UTF-8 text")
        except OSError as error:
            problems.append(f"{text}: cannot be read: {error.strerror}")
        else:
            problems += [] if captions[name] else [f"{text}: empty"]
    if problems:
        raise UserError(
            f"{folder}: {len(problems)} of {len(images)} images have no usable caption: {listed(problems)}. "
            "Each image needs a UTF-8 .txt file of its name, or the folder a metadata.jsonl or metadata.csv"
        )
    if orphans := sorted(text for stem, text in texts.items() if stem not in stems):
        logger.warning("%s: %d .txt files belong to no image: %s", folder, len(orphans), listed(orphans))
    return captions


def _warn_of_images_without_row(images: Sequence[str], captions: Mapping[str, str], metadata: Path) -> None:
    left_out = [name for name in images if name not in captions]
    if left_out:
        logger.warning(
            "%s: %d of %d images have no row and are left out: %s",
            metadata,
            len(left_out),
            len(images),
            listed(left_out),
        )


def _refuse_links_out(folder: Path, names: Sequence[str]) -> None:
    """A link can make any file of this machine look like a part of the folder."""
    root = folder.resolve()
    outside = [name for name in names if not (folder / name).resolve().is_relative_to(root)]
    if outside:
        raise UserError(
            f"{folder}: {len(outside)} files are links that leave it: {listed(outside)}; copy the files in"
        )
