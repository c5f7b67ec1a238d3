"""This file keeps what was counted for a plan in a folder, where the next plan of the same finds it."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes, replacing, signed_line
from diffsynth_lite.pipelines import ModelFamily

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_LIBRARIES = ("torch", "diffusers", "peft", "transformers", "accelerate")
_MOST_FILES = 500
"""The oldest go; a plan has about 12, of 1 to 20 KB."""
_MOST_BYTES = 2**24
_Count = TypeVar("_Count")


class KeptCounts:
    """The counts of plans of a family, kept in a folder; what cannot be read or written is counted again.

    Args:
        folder: None keeps none; neither are those kept of a family outside of this package, or with a library
            in development, whose code may change without a version.
        on_count: called before anything is counted or looked for; what it raises ends a plan that is no
            longer wanted.

    Attributes:
        num_reused: how many counts were found in the folder.
    """

    def __init__(
        self, folder: Path | None, family: ModelFamily, on_count: Callable[[], None] = lambda: None
    ) -> None:
        is_ours = type(family).__module__.partition(".")[0] == __name__.partition(".")[0]
        is_fixed = is_ours and not any("dev" in each or "+git" in each for each in map(version, _LIBRARIES))
        self._folder, self._family = folder if is_fixed else None, family
        self._components: dict[str, str] = {}
        self._on_count = on_count
        self.num_reused = 0

    def of(
        self, name: str, settings: Mapping[str, Any], kind: type[_Count], count: Callable[[], _Count]
    ) -> _Count:
        """A count, made now or found.

        Args:
            settings: all of a config that it depends on.
            kind: its type, a dataclass or a number.
        """
        self._on_count()
        if self._folder is None:
            return count()
        adapter = TypeAdapter(kind)
        try:
            path = self._folder / f"{self.key_of(name, settings)}.json"
        except (OSError, UserError) as error:
            logger.debug("%s is counted: %s", name, error)
            return count()
        try:
            content = read_bytes(path, most_bytes=_MOST_BYTES)
            line = content.partition(b"\n")[0]
            if content == signed_line(line):
                kept = adapter.validate_json(line)
                self.num_reused += 1
                return kept
        except (OSError, UserError, ValidationError) as error:
            logger.debug("%s is counted: %s", name, error)
        made = count()
        try:
            self._keep(path, signed_line(adapter.dump_json(made)))
        except OSError as error:
            logger.debug("the count of %s is not kept: %s", name, error)
        return made

    def key_of(self, name: str, settings: Mapping[str, Any]) -> str:
        """A hash of all that a count depends on: what the planner reads of code, a folder and a config."""
        family = self._family
        if not self._components:
            parts = (*family.components, *family.components_without_weights)
            self._components = {part: family.folder.fingerprint(part) for part in parts}
        read = (
            *(name, _versions(), type(family).__qualname__, family.trained),
            *(family.with_audio, family.with_controls, family.control_downscale),
            *(self._components, settings),
        )
        return hashlib.sha256(json.dumps(read, sort_keys=True, default=repr).encode()).hexdigest()

    def _keep(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        # Also what a plan that was killed left unfinished.
        files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in files[_MOST_FILES:]:
            old.unlink(missing_ok=True)


@cache
def _versions() -> Mapping[str, str]:
    """Of the libraries, and a hash of this package."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(_PACKAGE)}\n".encode() + file.read_bytes())
    return {name: version(name) for name in _LIBRARIES} | {_PACKAGE.name: digest.hexdigest()}
