"""This file downloads from the hub what a run needs of a pipeline, and nothing else that is there."""

import errno
import glob
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock, tqdm  # type: ignore[attr-defined]  # not listed there

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.progress_log import ProgressLog

logger = logging.getLogger(__name__)

INDEXES = ("model_index.json", "modular_model_index.json")
"""What lists a pipeline's components: of a folder with both, the first does."""
SMALL_SUFFIXES = (".json", ".txt", ".jinja", ".model")
"""Settings and vocabularies; other files next to the weights are of no use here."""


@dataclass(frozen=True, kw_only=True)
class HubCommit:
    """One commit of a repository: all that is fetched of a pipeline is of the same one.

    Attributes:
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
            path = Path(snapshot_download(repository, revision=revision, allow_patterns=[*INDEXES]))
        if not any((path / name).is_file() for name in INDEXES):
            raise UserError(
                f"model.path: {repository} on the hub holds no {' and no '.join(INDEXES)}, so that it is "
                "not a pipeline in the layout of diffusers; look for one: its name often ends in -Diffusers"
            )
        return cls(repository=repository, path=path)

    @classmethod
    def find_with(
        cls,
        repository: str,
        revision: str | None,
        subfolder: str,
        *,
        why: str = ", for a component of the pipeline",
        besides: str = "",
    ) -> "HubCommit":
        """As ``find``, of a repository that need not be a pipeline; fetches the settings in a folder of it.

        Args:
            why: it is looked for, to be logged.
            besides: what else it could have been that is not there, for the message.

        Raises:
            UserError: there is no such repository or revision; it is gated or cannot be reached.
        """
        logger.info("Looking for %s on the hub%s.", repository, why)
        allowed, ignored = _settings_in([subfolder])
        with _explained(repository, revision, besides=besides):
            found = snapshot_download(
                repository, revision=revision, allow_patterns=allowed, ignore_patterns=ignored
            )
        return cls(repository=repository, path=Path(found))

    def fetch_settings(self, subfolders: Iterable[str]) -> None:
        """Get the settings and vocabularies in some folders; an empty name is the repository itself."""
        by_depth = defaultdict(list)
        for subfolder in subfolders:
            by_depth[len(PurePosixPath(subfolder).parts)].append(subfolder)
        for alike in by_depth.values():
            self._fetch(*_settings_in(alike))

    def list_files(self, subfolders: Iterable[str]) -> dict[str, dict[str, int]]:
        """Names of the files in each folder, without its folders, and their bytes."""
        with _explained(self.repository):
            tree = list(HfApi().list_repo_tree(self.repository, revision=self.path.name, recursive=True))
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
        return {
            subfolder: {
                Path(path).name: size
                for path, size in sizes.items()
                if PurePosixPath(path).parent == PurePosixPath(subfolder)
            }
            for subfolder in subfolders
        }

    def missing(self, files: Mapping[str, int]) -> dict[str, int]:
        """Those of some files that are not there yet; logs how much that is.

        Args:
            files: bytes, by path in the repository.
        """
        missing = {path: size for path, size in files.items() if not (self.path / path).exists()}
        needed, total = sum(missing.values()), sum(files.values())
        if missing:
            logger.info(
                "%s: %s to download in %d files to %s, where %s are free; %s of its weights are there "
                "already.",
                *(self.repository, format_bytes(needed), len(missing), self.cache),
                *(format_bytes(shutil.disk_usage(self.cache).free), format_bytes(total - needed)),
            )
        return missing

    def require_access(self) -> None:
        """Check that files may be downloaded.

        Raises:
            UserError: the repository is gated, or the hub refuses the token.
        """
        with _explained(self.repository):
            HfApi().auth_check(self.repository)

    def fetch_weights(self, paths: Iterable[str], bars: type[tqdm]) -> None:
        """Get files.

        Args:
            bars: shows how far it is.

        Raises:
            UserError: the download failed.
            RunInterrupted: somebody stopped it.
        """
        try:
            self._fetch([glob.escape(path) for path in paths], tqdm_class=bars)
        except KeyboardInterrupt:
            raise RunInterrupted(f"downloading {self.repository} was interrupted. {_GOES_ON}") from None

    @property
    def cache(self) -> Path:
        """The hub's cache, where it is."""
        return self.path.parents[2]

    def lock(self) -> AbstractContextManager[object]:
        """A lock for one process on this machine: others of a run wait, and then find the files there."""
        folder = self.cache / ".locks" / self.path.parents[1].name
        folder.mkdir(parents=True, exist_ok=True)
        return WeakFileLock(folder / "weights.lock")

    def _fetch(
        self,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None = None,
        tqdm_class: type[tqdm] | None = None,
    ) -> None:
        with _explained(self.repository):
            snapshot_download(
                self.repository,
                revision=self.path.name,
                allow_patterns=allow_patterns,
                ignore_patterns=ignore_patterns,
                tqdm_class=tqdm_class,
            )


def fetch_all(wanted: Mapping[HubCommit, Mapping[str, int]]) -> None:
    """Get files of several repositories that are not there yet; begins only where all fit and may be fetched.

    Args:
        wanted: bytes, by path in the repository.

    Raises:
        UserError: the disk has no room for them, a repository is gated, or the download failed.
        RunInterrupted: somebody stopped it.
    """
    missing = {hub: lacking for hub, files in wanted.items() if (lacking := hub.missing(files))}
    needed = sum(sum(files.values()) for files in missing.values())
    for hub in missing:
        free = shutil.disk_usage(hub.cache).free
        if needed > free:
            raise UserError(
                f"model.path: {format_bytes(needed)} of {' and '.join(one.repository for one in missing)} "
                f"are to be downloaded, but the disk of {hub.cache} has {format_bytes(free)} free; free "
                f"some, or {_OTHER_DISK}"
            )
        hub.require_access()
    if not missing:
        return
    progress, before = ProgressLog(None, needed, phase="downloading"), 0
    for hub, files in missing.items():
        hub.fetch_weights(files, _reporting_bars(progress, before, needed))
        before += sum(files.values())


def _reporting_bars(progress: ProgressLog, before: int, needed: int) -> type[tqdm]:
    """The hub's progress bars, which also report the bytes that are here.

    Args:
        before: bytes of what was downloaded before.
    """
    lock, counts = Lock(), dict[int, int]()

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts_bytes = settings.get("unit") == "B"
            super().__init__(*args, **settings)  # type: ignore[no-untyped-call]

        def update(self, number: float | None = 1) -> bool | None:
            if self._counts_bytes:
                with lock:  # The files are downloaded in several threads.
                    counts[id(self)] = counts.get(id(self), 0) + int(number or 0)
                    # The hub may show twice how the same bytes arrive.
                    progress.reach(min(before + max(counts.values()), needed))
            shown: bool | None = super().update(number)
            return shown

    return ReportingBar


def _settings_in(subfolders: Iterable[str]) -> tuple[list[str], list[str]]:
    """Patterns of settings in folders of one depth, and of what those let through in folders of theirs."""
    allowed, deepest = [], 0
    for subfolder in subfolders:
        start = "".join(f"{glob.escape(part)}/" for part in PurePosixPath(subfolder).parts)
        allowed += [f"{start}*{suffix}" for suffix in SMALL_SUFFIXES]
        deepest = start.count("/")
    # Such folders are for other programs.
    return allowed, ["*/" * (deepest + 1) + "*"]


_TOKEN = "the token in use (HF_TOKEN, or that of `hf auth login`)"
_OTHER_DISK = "set HF_HOME to a folder on another disk"
_GOES_ON = "The same command continues with it: files that are complete stay, the others begin again."
NO_FOLDER = ", and there is no local folder of that name"
"""To add where an id that the hub does not know may have been meant for a folder."""


@contextmanager
def _explained(repository: str, revision: str | None = None, *, besides: str = NO_FOLDER) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        raise UserError(_refusal(error, repository, revision, besides)) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise UserError(
            f"model.path: the hub cannot be reached and {repository} is not in the local cache, or not "
            "all of it; check the network (or HF_HUB_OFFLINE), or give a local folder"
        ) from None
    except HFValidationError:
        raise UserError(f"model.path: {repository!r} is neither a local folder nor a valid hub id") from None
    except Exception as error:  # of the connection, of the disk
        raise UserError(_failure(error, repository)) from error


def _refusal(error: HfHubHTTPError, repository: str, revision: str | None, besides: str) -> str:
    """The message about an error that the hub answers with."""
    has_token = get_token() is not None
    if isinstance(error, GatedRepoError):
        login = "then log in with `hf auth login`"
        if has_token:
            login = (
                f"as the account of {_TOKEN}; a fine-grained one must also allow public gated repositories"
            )
        return f"model.path: {repository} is gated: accept its terms on its hub page, {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"model.revision: {repository} has no revision {revision!r}"
    if error.response.status_code == HTTPStatus.UNAUTHORIZED and has_token:
        return (
            f"model.path: the hub refuses {_TOKEN} for {repository}: log in again with `hf auth login`, or "
            "unset it where the repository is public"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"model.path: the hub has no repository {repository} (or it is private: `hf auth login`){besides}"
        )
    return _failure(error, repository)


def _failure(error: Exception, repository: str) -> str:
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return (
        f"model.path: downloading {repository} failed ({reason})"
        f"{f'; free some space, or {_OTHER_DISK}' if is_full else ''}. {_GOES_ON}"
    )
