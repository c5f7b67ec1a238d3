"""This file finds what a run left to download, and sends folders as a zip while it reads them."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import SUFFIX, LoraCopy, chosen_copy, lora_copies

_PART_BYTES = 1 << 20
_FILES = {
    "config.yaml": "Config as it was given",
    "resolved.yaml": "All its settings",
    "metrics.jsonl": "Numbers of the charts",
}


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file of a run, or a folder of its as a zip.

    Attributes:
        name: under which it is asked for, and saved.
    """

    name: str
    words: str
    path: Path
    files: Sequence[Path]

    @property
    def size(self) -> str:
        """In words; empty where the run has replaced a file meanwhile."""
        with suppress(OSError):
            return format_bytes(sum(path.stat().st_size for path in self.files))
        return ""


def downloads(run: RunFolder) -> dict[str, Download]:
    """What is there, by name: first the LoRA that was chosen, then the latest."""
    kinds = {
        run.lora_folder: "LoRA",
        run.ema_lora_folder: "Averaged LoRA",
        run.best_lora_folder: "Best LoRA",
    }
    exports: dict[Path, str] = {}
    with suppress(UserError):  # who chooses again mends it
        if chosen := chosen_copy(run):
            exports[chosen.path] = f"Chosen {kinds[run.path / chosen.export]}, step {chosen.step}"
    exports |= kinds
    for export in (run.lora_folder, run.ema_lora_folder):
        for copy in reversed(lora_copies(run.checkpoints_folder, export.name)):
            exports.setdefault(copy.path, f"{exports[export]} of step {copy.step}")
    found = [each for folder, words in exports.items() for each in _of_folder(folder, words)]
    found.sort(key=lambda each: each.path.is_dir())
    others = {run.path / name: words for name, words in _FILES.items() if _is_file(run.path / name)}
    found += [
        Download(name=path.name, words=words, path=path, files=[path]) for path, words in others.items()
    ]
    found += [
        Download(
            name=name_of_converted(file), words=f"{file.stem} for {file.parent.name}", path=file, files=[file]
        )
        for file in _files(run.converted_folder)
        if file.suffix == SUFFIX and not run.converted_folder.is_symlink()
    ]
    return {each.name: each for each in found}


def name_of_converted(file: Path) -> str:
    """Under which a LoRA is downloaded that was written into the folder of a format."""
    return f"{file.stem}-{file.parent.name}{SUFFIX}"


def zipped(folder: Path) -> Iterator[bytes]:
    """The files of a folder as a zip, in parts: none is held as a whole."""
    parts = _Parts()
    archive = zipfile.ZipFile(parts, "x")
    for path in _files(folder):
        name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
        # A zip has no dates before 1980; it takes that year for them.
        place = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
        with path.open("rb") as file, archive.open(place, "w", force_zip64=True) as entry:
            while content := file.read(_PART_BYTES):
                entry.write(content)
                yield parts.taken()
    archive.close()
    yield parts.taken()


class _Parts(bytearray):
    """A file that gives away what is written into it."""

    def write(self, content: bytes) -> int:
        self += content
        return len(content)

    def flush(self) -> None:
        """As files have it, like ``close``."""

    close = flush

    def taken(self) -> bytes:
        """What was written since."""
        content = bytes(self)
        self.clear()
        return content


def _of_folder(folder: Path, words: str) -> Iterator[Download]:
    """The file of weights, which other programs load, and the whole folder, but of a copy by step."""
    files = _files(folder) if folder.is_dir() and not folder.is_symlink() else []
    weights = [path for path in files if path.suffix == SUFFIX and path.parent == folder]
    if len(weights) == 1:
        name = f"{folder.name}{SUFFIX}"
        yield Download(name=name, words=words, path=weights[0], files=weights)
    if files and (len(weights) != 1 or LoraCopy.of(folder) is None):
        words = f"{words}, whole folder"
        yield Download(name=f"{folder.name}.zip", words=words, path=folder, files=files)


def _files(folder: Path) -> list[Path]:
    """Without links, which may lead anywhere."""
    return [path for path in sorted(folder.rglob("*")) if _is_file(path)]


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
