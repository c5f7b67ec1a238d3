"""The checkpoints of a run on disk: each folder appears whole, and is dropped only after a newer one has.

Next to them are copies of the LoRA at each save, which appear in the same way and stay for longer.

Writing: in a ``.tmp-`` folder, every file synced, the manifest last, the folder synced, renamed to its name,
the parent synced. Then the oldest are removed. Whenever a process is killed or a machine switched off, the
newest checkpoint for which ``save`` returned can be loaded.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import CheckpointError, RunDivergedError, RunStoppedError, UserError
from diffsynth_lite.files import free_disk_bytes, is_unfinished, set_aside, sync, temporary_path, write_synced
from diffsynth_lite.run_folder.loras import LoraCopy, copy_name, lora_copies
from diffsynth_lite.training.checkpoint.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    ListedFile,
    Manifest,
    folder_name,
    read_checkpoint,
    read_manifest,
    require_file_name,
    step_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Sizes of a save: a checkpoint, and the LoRA files."""

    checkpoint: int
    lora: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.checkpoint + self.lora

    @classmethod
    def of(
        cls,
        num_weights: int,
        *,
        optimizer_bytes: int,
        lora_dtype: torch.dtype,
        has_average: bool,
        num_in_vectors: int = 0,
    ) -> "SavedBytes":
        """The sizes for an adapter of ``num_weights`` weights.

        Args:
            lora_dtype: of the LoRA files; a checkpoint is in fp32.
            num_in_vectors: weights that are magnitudes of a DoRA, which files have twice, in fp32.
        """
        adapters = 2 if has_average else 1
        vectors = 2 * num_in_vectors * torch.float32.itemsize
        return cls(
            checkpoint=adapters * num_weights * torch.float32.itemsize + optimizer_bytes,
            lora=adapters * ((num_weights - num_in_vectors) * lora_dtype.itemsize + vectors),
        )


class CheckpointStore:
    """The checkpoints of one run, ``step-00000200`` and so on, in one folder.

    One process writes, and only it calls ``latest``, because that moves damaged checkpoints aside. Files and
    folders with other names are not touched.

    Args:
        keep: newest complete checkpoints to keep, at least 1.
        keep_every: checkpoints of steps that are multiples of it are never removed.
        keep_loras: newest copies of the LoRA to keep of steps whose checkpoint was removed; None keeps all.
        chosen: returns the copy that a person chose, which stays, too; asked at each save.

    Attributes:
        pinned: a step whose checkpoint and LoRA stay too, such as the best one's.
        known_good: the step of the newest checkpoint whose weights are known to be good, which stays too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int | None = None,
        keep_loras: int | None = None,
        chosen: Callable[[], LoraCopy | None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must be kept")
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.keep_loras = keep_loras
        self._chosen = chosen
        self.pinned: int | None = None
        self.known_good: int | None = None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, complete or not, oldest first."""
        folders = [entry for entry in self._entries() if entry.is_dir() and not entry.is_symlink()]
        return sorted(step for step in map(step_of, (entry.name for entry in folders)) if step is not None)

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint, then drop the oldest ones; a complete one of the same step is left as it is.

        Args:
            tensors: file name without suffix to named tensors, on any device.
            documents: file name without suffix to anything that json can hold.

        Returns:
            The folder of the checkpoint, synced to the disk.

        Raises:
            RunDivergedError: a tensor holds NaN or infinity; the earlier checkpoints are intact.
        """
        _check_finite(tensors, step)
        path = self.folder / folder_name(step)
        if not self._is_good(path):
            num_bytes = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
            self._write(path, step, _contents(tensors, documents), num_bytes)
        self._rotate()  # Also for a writer that was killed before it had.
        return path

    def keep_lora(self, step: int, export: Path, files: Sequence[Path]) -> None:
        """Keep a copy of files of an export, ``lora-00000200``, then drop those of the oldest steps.

        A copy of the same step is left as it is. Where it cannot be known which one was chosen, all stay.

        Args:
            export: the folder with the files, ``lora`` or ``lora_ema``.
        """
        path = self.folder / copy_name(export.name, step)
        if not path.exists():
            contents = ((file.relative_to(export).as_posix(), file.read_bytes()) for file in files)
            self._write(path, step, contents, sum(file.stat().st_size for file in files))
        if self.keep_loras is None:
            return
        try:
            chosen = self._chosen()
        except UserError as error:
            logger.warning("%s", error)
            return
        steps = self.steps()
        copies = [copy for copy in lora_copies(self.folder, export.name) if copy != chosen]
        further = [copy for copy in copies if copy.step not in (*steps, self.pinned)]
        for copy in further[: max(0, len(further) - self.keep_loras)]:
            _drop(copy.path)

    def latest(self) -> Checkpoint | None:
        """The newest good checkpoint, or None when there never was one.

        Newer ones that are damaged are renamed to ``.bad-<name>-<n>``, with a warning; none is deleted.

        Raises:
            CheckpointError: there were checkpoints, and none is good.
        """
        for step in reversed(self.steps()):
            path = self.folder / folder_name(step)
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                aside = set_aside(path, "bad")
                logger.warning("%s. Moved to %s; looking for an earlier checkpoint.", error, aside)
        damaged = sorted(entry.name for entry in self._entries() if entry.name.startswith(".bad-"))
        if damaged:
            raise CheckpointError(
                f"{self.folder} holds damaged checkpoints only ({', '.join(damaged)}): "
                "restore one from a copy, or remove them to start from the beginning"
            )
        return None

    def cut_back_to(self, step: int) -> None:
        """Rename the checkpoints and LoRAs of later steps to ``.left-<name>-<n>``: the run resumes from
        ``step``.

        Otherwise they would count as this run's newest.
        """
        for later in self.steps():
            if later > step:
                aside = set_aside(self.folder / folder_name(later), "left")
                logger.warning(
                    "The run resumes from step %d: checkpoint of step %d moved to %s", step, later, aside
                )
        for copy in filter(None, map(LoraCopy.of, self._entries())):
            if copy.step > step:
                set_aside(copy.path, "left")

    def clean(self) -> None:
        """Remove leftovers of killed writers; only for the process that holds the run folder's lock."""
        for entry in self._entries():
            if is_unfinished(entry.name):
                _remove(entry)

    def _write(self, path: Path, step: int, contents: Iterable[tuple[str, bytes]], num_bytes: int) -> None:
        try:
            self._write_whole(path, step, contents)
        except OSError as error:
            raise RunStoppedError(
                f"checkpoint {path} could not be written ({error.strerror}): it needs about "
                f"{format_bytes(num_bytes)}, {format_bytes(free_disk_bytes(self.folder))} are free "
                "there; the checkpoints before it are intact"
            ) from error

    def _write_whole(self, path: Path, step: int, contents: Iterable[tuple[str, bytes]]) -> None:
        if not self.folder.exists():
            self.folder.mkdir()  # Not the run folder: where that is gone, its lock is too.
            sync(self.folder.parent)
        temporary = temporary_path(path)
        temporary.mkdir()
        try:
            files = {}
            for name, content in contents:
                require_file_name(name)
                if not (folder := (temporary / name).parent).exists():
                    folder.mkdir()
                write_synced(temporary / name, content)
                files[name] = ListedFile.of(content)
            write_synced(temporary / MANIFEST_NAME, Manifest(step=step, files=files).encode())
            for folder in {(temporary / name).parent for name in files} - {temporary}:
                sync(folder)
            sync(temporary)
            temporary.rename(path)
            sync(self.folder)
        except BaseException:
            # Where this fails, clean() removes it later.
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _is_good(self, path: Path) -> bool:
        """Whether a good checkpoint is there already; a damaged one makes room."""
        if not path.is_dir():
            return False
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            logger.warning("%s. Moved to %s and written again.", error, set_aside(path, "bad"))
            return False
        return True

    def _rotate(self) -> None:
        """Keep the newest complete ones and those that stay; incomplete ones neither count nor are
        removed."""
        complete = [step for step in self.steps() if _is_complete(self.folder / folder_name(step))]
        for step in complete[: -self.keep]:
            if step in (self.pinned, self.known_good) or (self.keep_every and step % self.keep_every == 0):
                continue
            _drop(self.folder / folder_name(step))

    def _entries(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []


def _contents(
    tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, Any]
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file, one at a time: host memory holds one file twice, not all of them."""
    for name in (*tensors, *documents):
        require_file_name(f"{name}.json")
    for name, named in tensors.items():
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in named.items()}
        yield f"{name}.safetensors", safetensors.torch.save(_without_shared_memory(plain))
    for name, document in documents.items():
        yield f"{name}.json", json.dumps(document, allow_nan=False).encode()


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with copies of those that share memory, as in bitsandbytes' state, which files cannot
    hold."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return own


def _check_finite(tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
    for name, named in tensors.items():
        for key, tensor in named.items():
            if not torch.isfinite(tensor).all():
                raise RunDivergedError(
                    f"step {step}: {key} of {name} holds NaN or infinity, so no checkpoint was written; "
                    "those before it are intact"
                )


def _is_complete(path: Path) -> bool:
    try:
        read_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True


def _drop(path: Path) -> None:
    """Remove a checkpoint or a copy of a LoRA, whose name is gone at once."""
    removed = temporary_path(path)
    try:
        path.rename(removed)
    except OSError as error:
        logger.warning("Old checkpoint %s cannot be removed: %s", path, error)
        return
    _remove(removed)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed and can be deleted by hand: %s", path, error)
