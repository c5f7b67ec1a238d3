"""This file adds files that a browser sends to a data set, and never over one that is there."""

import io
import lzma
import shutil
import stat
import zipfile
import zlib
from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from anyio import to_thread

from diffsynth_lite.data.captions import CAPTION_SUFFIXES, MAX_CAPTION_BYTES
from diffsynth_lite.data.folder import is_unicode
from diffsynth_lite.data.images import IMAGE_SUFFIXES
from diffsynth_lite.data.records import VIDEO_SUFFIXES
from diffsynth_lite.data.sources import METADATA_FILES
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import DISK_FULL, free_disk_bytes, is_abandoned, link_new, temporary_path

MOST_BYTES = 8 << 30
"""Of a file that is sent, and of one in a zip."""
MOST_UNPACKED_BYTES = 64 << 30
"""Of all files in a zip together."""
MOST_MEMBERS = 100_000
_MOST_LIST_BYTES = 64 << 20
_MOST_NAME_BYTES = 200
_MOST_NAMED = 5
_MOST_FOLDERS = 99
"""Around a file; each is one more call of a function that makes them."""
_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, *CAPTION_SUFFIXES)
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    UnicodeDecodeError,
    NotImplementedError,
    RuntimeError,
)
"""Errors of a zip: damaged, of a compression that Python lacks, and, RuntimeError, encrypted."""


async def receive(
    body: AsyncIterable[bytes], folder: Path, name: str, *, num_bytes: int
) -> dict[str, list[str]]:
    """Add a file, or the files in a zip.

    Args:
        body: the content, in pieces.
        name: below the folder, with forward slashes; it may come from anybody.
        num_bytes: of the content, as the browser claims.

    Returns:
        Names of the files that were ``added``; of a zip also of those whose names are ``taken``, and of those
        that no run reads, ``unread``.

    Raises:
        UserError: it is of another kind, too large or damaged, its name is taken, or the disk is full.
    """
    is_zip = name.lower().endswith(".zip")
    target = "upload.zip" if is_zip else _safe_name(name)
    for left in filter(is_abandoned, folder.glob(".tmp-*")):  # by a server that was killed
        left.unlink(missing_ok=True)
    _require_room(num_bytes, folder, name)  # A run may need the rest of the disk.
    with _temporary(folder / Path(target).name, name) as temporary:
        await _save(body, temporary, name)
        if is_zip:
            return await to_thread.run_sync(_unpack, temporary, folder, name)
        if not _place(temporary, target, folder):
            raise UserError(f"{name}: there is a file of this name already; it was left as it is")
    return {"added": [target], "taken": [], "unread": []}


async def receive_new(
    body: AsyncIterable[bytes], folder: Path, name: str, *, num_bytes: int
) -> dict[str, list[str]]:
    """As :func:`receive` with a zip for a data set that is not there yet, and appears as a whole.

    Raises:
        UserError: it is not a zip, or holds nothing that a run reads; then no folder is left.
    """
    if not name.lower().endswith(".zip"):
        raise UserError(f"{name}: is not a zip")
    unfinished = temporary_path(folder)
    for left in filter(is_abandoned, folder.parent.glob(".tmp-*")):  # by a server that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        found = await receive(body, unfinished, name, num_bytes=num_bytes)
        if not found["added"]:
            raise UserError(f"{name}: holds no image, clip, caption or table{named_few(found['unread'])}")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return found


def named_few(names: Sequence[str]) -> str:
    """What else a zip holds, for a message; empty for nothing."""
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"; not read: {', '.join(name[:_MOST_NAME_BYTES] for name in names[:_MOST_NAMED])}{more}" * bool(
        names
    )


async def _save(body: AsyncIterable[bytes], path: Path, name: str) -> None:
    most_bytes = _most_bytes(name)
    with path.open("xb") as file:
        async for piece in body:
            if file.tell() + len(piece) > most_bytes:
                raise UserError(f"{name}: larger than {most_bytes:,} bytes, which are the most")
            await to_thread.run_sync(file.write, piece)


def _unpack(archive: Path, folder: Path, name: str) -> dict[str, list[str]]:
    """Add the media and captions of a zip, without the one folder that all of them are in.

    Raises:
        UserError: a name in it leads out, or it is damaged or too large; then nothing is added, unless the
            damage shows only while it is unpacked.
    """
    done: dict[bool, list[str]] = {True: [], False: []}
    try:
        with _Archive(archive) as file, zipfile.ZipFile(file) as opened:
            try:
                members, unread = _members(opened, folder, name)
            except UserError as error:
                raise UserError(f"{name}: nothing was taken from it; {error}") from None
            for target, member in members.items():
                done[_extract(opened, member, folder, target, name)].append(target)
    except _DAMAGED as error:
        raise UserError(f"{name}: cannot be unpacked: {error}") from error
    return {"added": done[True], "taken": done[False], "unread": unread}


class _Archive(io.FileIO):
    """A zip whose list of files, which `zipfile` reads at once and takes ten times the memory for, is short.

    Raises:
        BadZipFile: it is not.
    """

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _MOST_LIST_BYTES:
            raise zipfile.BadZipFile(f"its list has {size:,} bytes, and {_MOST_LIST_BYTES:,} are the most")
        return super().read(size)


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path, target: str, name: str) -> bool:
    """Unpack one file, of which `zipfile` reads no more than it claims; False where the name is taken."""
    with _temporary(folder / Path(target).name, name) as temporary:
        with archive.open(member) as content, temporary.open("xb") as file:
            shutil.copyfileobj(content, file)
        return _place(temporary, target, folder)


def _members(
    archive: zipfile.ZipFile, folder: Path, name: str
) -> tuple[dict[str, zipfile.ZipInfo], list[str]]:
    """The files to unpack by their names in the data set, and the names of the others."""
    infos = [info for info in archive.infolist() if not info.is_dir()]
    if len(infos) > MOST_MEMBERS:
        raise UserError(f"it holds {len(infos):,} files, and {MOST_MEMBERS:,} are the most")
    found: dict[str, zipfile.ZipInfo] = {}
    unread = []
    for info in infos:
        parts = _parts(info.filename)  # A name that leads out is refused, whatever it is the name of.
        is_odd = parts[0] == "__MACOSX" or stat.S_ISLNK(info.external_attr >> 16)
        if is_odd or any(part.startswith(".") for part in parts) or not _is_read(info.filename):
            unread.append(info.filename)
        else:
            found[_safe_name(info.filename)] = info
    total = sum(info.file_size for info in found.values())
    if total > MOST_UNPACKED_BYTES or any(info.file_size > _most_bytes(path) for path, info in found.items()):
        raise UserError(
            f"unpacked it has {total:,} bytes; {MOST_UNPACKED_BYTES:,} are the most, {MOST_BYTES:,} for a "
            f"file and {MAX_CAPTION_BYTES:,} for a caption"
        )
    _require_room(total, folder, name)
    tops = {path.partition("/")[0] for path in found}
    if len(tops) == 1 and not tops & set(found):
        found = {path.partition("/")[2]: info for path, info in found.items()}
    return found, unread


def _require_room(num_bytes: int, folder: Path, name: str) -> None:
    if num_bytes > (free := free_disk_bytes(folder)):
        raise UserError(f"{name}: takes {num_bytes:,} bytes, and {free:,} are free on the disk")


@contextmanager
def _temporary(path: Path, name: str) -> Iterator[Path]:
    """A hidden path for what is not complete, gone afterwards; a full disk becomes a line for the person."""
    temporary = temporary_path(path)
    try:
        yield temporary
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(f"{name}: the disk is full") from error
    finally:
        temporary.unlink(missing_ok=True)


def _place(temporary: Path, target: str, folder: Path) -> bool:
    """Give a complete file its name below the folder; False where it is taken, and what is there stays."""
    path = folder / target
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{target}: is behind a link that leaves the folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        link_new(temporary, path)
    except (FileExistsError, NotADirectoryError):
        return False
    return True


def _safe_name(name: str) -> str:
    """The name of a file below the folder.

    Raises:
        UserError: it leads out, is hidden or too long, or is that of something that no run reads.
    """
    parts = _parts(name)
    if any(part.startswith(".") or len(part.encode()) > _MOST_NAME_BYTES for part in parts):
        raise UserError(f"{name}: is a hidden file, or has a name of more than {_MOST_NAME_BYTES} bytes")
    if len(parts) > _MOST_FOLDERS + 1:
        raise UserError(f"{name[:_MOST_NAME_BYTES]}...: is in more than {_MOST_FOLDERS} folders")
    if not _is_read(name):
        raise UserError(f"{name}: is not an image, clip, caption or zip; {', '.join(_SUFFIXES)} are read")
    return "/".join(parts)


def _parts(name: str) -> list[str]:
    parts = name.replace("\\", "/").split("/")
    bad = not is_unicode(name) or any(letter < " " for letter in name) or PureWindowsPath(name).drive
    if bad or any(part in ("", ".", "..") for part in parts):
        raise UserError(f"{name!r}: is not the name of a file below the data set's folder")
    return parts


def _is_read(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) or PurePosixPath(name).name in METADATA_FILES


def _most_bytes(name: str) -> int:
    return MAX_CAPTION_BYTES if name.lower().endswith(CAPTION_SUFFIXES) else MOST_BYTES
