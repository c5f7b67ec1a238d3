"""This file downloads from the hub what a run needs of a pipeline, and nothing else that is there."""

import errno
import glob
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not listed there

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import RunInterrupted, UserError

logger = logging.getLogger(__name__)

INDEX = "model_index.json"
SMALL_SUFFIXES = (".json", ".txt", ".jinja", ".model")
"""Settings and vocabularies; other files beside the weights are of no use here."""


@dataclass(frozen=True, kw_only=True)
class HubCommit:
    """One commit of a repository: all that is fetched of a pipeline is of the same one.

    Attributes:
        repository: such as ``Qwen/Qwen-Image``.
        path: its folder in the hub's cache, which is named by the commit.
    """

    repository: str
    path: Path

    @classmethod
    def find(cls, repository: str, revision: str | None) -> "HubCommit":
        """The commit that a revision is now, or was when the hub could last be reached; fetches the index.

        Raises:
            UserError: there is no such repository, revision or pipeline; it is gated or cannot be reached.
        """
        logger.info(
            "Looking for %s on the hub (downloaded once, then read from the hub's cache).", repository
        )
        with _explained(repository, revision):
            path = Path(snapshot_download(repository, revision=revision, allow_patterns=[INDEX]))
        if not (path / INDEX).is_file():
            raise UserError(
                f"model.path: {repository} on the hub holds no {INDEX}, so that it is no pipeline in the "
                "layout of diffusers; look for one that is: its name often ends in -Diffusers"
            )
        return cls(repository=repository, path=path)

    def fetch_settings(self, components: Iterable[str]) -> None:
        """Get the settings and vocabularies of some components."""
        self._fetch([f"{component}/*{suffix}" for component in components for suffix in SMALL_SUFFIXES])

    def list_files(self, components: Iterable[str]) -> dict[str, dict[str, int]]:
        """Names of the files of each component, without its folders, and their bytes."""
        with _explained(self.repository):
            tree = list(HfApi().list_repo_tree(self.repository, revision=self.path.name, recursive=True))
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
        return {
            component: {
                Path(path).name: size for path, size in sizes.items() if str(Path(path).parent) == component
            }
            for component in components
        }

    def fetch_weights(self, files: Mapping[str, int]) -> None:
        """Get files that are not there yet; says how much that is, and begins only where it fits.

        Args:
            files: bytes, by path in the repository.

        Raises:
            UserError: the disk has no room for them, or the download failed.
            RunInterrupted: somebody stopped it.
        """
        missing = {path: size for path, size in files.items() if not (self.path / path).exists()}
        needed, total = sum(missing.values()), sum(files.values())
        if not missing:
            return
        cache = self.path.parents[2]
        free = shutil.disk_usage(self.path).free
        logger.info(
            "%s: %s to download in %d files to %s, where %s are free; %s of its weights are there already.",
            *(self.repository, format_bytes(needed), len(missing), cache),
            *(format_bytes(free), format_bytes(total - needed)),
        )
        if needed > free:
            raise UserError(
                f"model.path: {format_bytes(needed)} of {self.repository} are to be downloaded, but the disk "
                f"of {cache} has {format_bytes(free)} free; free some, or {_OTHER_DISK}"
            )
        try:
            self._fetch([glob.escape(path) for path in missing])
        except KeyboardInterrupt:
            raise RunInterrupted(f"downloading {self.repository} was interrupted. {_GOES_ON}") from None

    def alone(self) -> AbstractContextManager[object]:
        """A lock that one process on this machine holds: others of a run wait, and find the files there."""
        folder = self.path.parents[2] / ".locks" / self.path.parents[1].name
        folder.mkdir(parents=True, exist_ok=True)
        return WeakFileLock(folder / "weights.lock")

    def _fetch(self, patterns: list[str]) -> None:
        with _explained(self.repository):
            snapshot_download(
                self.repository,
                revision=self.path.name,
                allow_patterns=patterns,
                ignore_patterns=["*/*/*"],  # folders in those of components are for other programs
            )


_OTHER_DISK = "set HF_HOME to a folder on another disk"
_GOES_ON = "The same command goes on with it: files that are complete stay, the others begin anew."


@contextmanager
def _explained(repository: str, revision: str | None = None) -> Iterator[None]:
    try:
        yield
    except GatedRepoError:
        raise UserError(
            f"model.path: {repository} is gated: accept its terms on its hub page, "
            "then log in with `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"model.revision: {repository} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"model.path: the hub has no repository {repository} (or it is private: `hf auth login`), "
            "and there is no local folder of that name"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise UserError(
            f"model.path: the hub cannot be reached and {repository} is not in the local cache, or not "
            "all of it; check the network (or HF_HUB_OFFLINE), or give a local folder"
        ) from None
    except HFValidationError:
        raise UserError(f"model.path: {repository!r} is neither a local folder nor a valid hub id") from None
    except Exception as error:  # of the connection, of the hub, of the disk
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"model.path: downloading {repository} failed ({reason})"
            f"{f'; free some space, or {_OTHER_DISK}' if is_full else ''}. {_GOES_ON}"
        ) from error
