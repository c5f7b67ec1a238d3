"""This file knows where the files of a component are: in the pipeline's folder, or in another repository."""

from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.folder.index import IndexEntry
from diffsynth_lite.pipelines.base.hub import SMALL_SUFFIXES, HubCommit

_OF_A_MODEL = "config.json"
"""It comes with weights: by itself it is not a component."""


@dataclass(frozen=True, kw_only=True)
class ComponentPlace:
    """Where the files of a component are.

    Attributes:
        path: of their folder.
        subfolder: the same in the pipeline's folder or in the repository.
        variant: of the weights that are loaded; None for the plain files.
        hub: where to get weights that are not there; None for a folder of the user's.
    """

    path: Path
    subfolder: str
    variant: str | None
    hub: HubCommit | None

    def file_names(self) -> list[str]:
        """Names of the files that are there, sorted."""
        return sorted(path.name for path in self.path.glob("*") if path.is_file())

    def small_files(self) -> list[Path]:
        """Settings and vocabularies."""
        return sorted(path for path in self.path.glob("*") if path.suffix in SMALL_SUFFIXES)

    def __str__(self) -> str:
        return str(self.path)


def holds_component(folder: Path, *, with_weights: bool = True) -> bool:
    """Whether a component's files are in a folder of the user's, which then goes before a repository.

    Source: ``_is_local_component`` in diffusers ``modular_pipeline.py``.

    Args:
        with_weights: whether those of a model must be there, next to its settings.
    """
    names = {path.name for path in folder.glob("*") if path.is_file()}
    return bool(names) and (not with_weights or names != {_OF_A_MODEL})


class OtherRepositories:
    """The repositories next to the pipeline's own that its index names, each looked for once."""

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str | None], HubCommit] = {}
        self._with_settings: set[tuple[HubCommit, str]] = set()

    def commit_of(self, component: str, entry: IndexEntry, *, instead: Path | None) -> HubCommit:
        """The commit that a component is read from, with the component's settings.

        All that is read of one revision is of the commit that it was first.

        Args:
            instead: a folder of the user's that could hold the component's files, for messages.

        Raises:
            UserError: there is no such repository or revision; it is gated or cannot be reached.
        """
        repository, key = str(entry.repository), (str(entry.repository).lower(), entry.revision)
        try:
            if key not in self._commits:
                found = HubCommit.find_with(repository, entry.revision, entry.subfolder)
                self._commits[key] = found
                self._with_settings.add((found, entry.subfolder))
            hub = self._commits[key]
            if (hub, entry.subfolder) not in self._with_settings:
                hub.fetch_settings([entry.subfolder])
                self._with_settings.add((hub, entry.subfolder))
        except UserError as error:
            _, _, reason = str(error).partition(": ")
            hint = "" if instead is None else f"; or put its files into {instead}"
            raise UserError(
                f"model.path: for {component} the index names {repository} on the hub: {reason}{hint}"
            ) from error
        return hub
