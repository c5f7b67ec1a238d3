"""This file finds a pipeline in diffusers' layout, on disk or on the hub, and identifies its weights."""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIX = ".safetensors"
_SMALL_SUFFIXES = (".json", ".txt", ".jinja", ".model")
_SMALL_FILES = tuple(f"*{suffix}" for suffix in _SMALL_SUFFIXES)
_OTHER_VARIANTS = (f"*.fp16*{_WEIGHT_SUFFIX}", f"*.bf16*{_WEIGHT_SUFFIX}")
_VARIANT = re.compile(r"\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors$")
_SAMPLED_BLOCKS = 64
_SAMPLED_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """A diffusers pipeline on disk: ``model_index.json`` and one folder a component.

    Attributes:
        path: the folder.
        variant: weight variant to load, such as ``fp16``; None for the plain files.
    """

    path: Path
    variant: str | None = None

    def pipeline_class_name(self) -> str:
        """Name of the pipeline class that ``model_index.json`` gives.

        Raises:
            UserError: the file is missing, is not JSON, or names no class.
        """
        name = self.pipeline_config().get("_class_name")
        if not isinstance(name, str):
            raise UserError(
                f"model.path: {self.path / 'model_index.json'} names no pipeline class (_class_name)"
            )
        return name

    def pipeline_config(self) -> dict[str, Any]:
        """What ``model_index.json`` holds: the pipeline's class, its components' classes and its settings."""
        return self._read_json(self.path / "model_index.json")

    def class_name(self, component: str) -> str | None:
        """The class of transformers or diffusers that ``model_index.json`` names for a component, if any."""
        match self.pipeline_config().get(component):
            case [_, str(name)]:
                return name
        return None

    def component_config(self, component: str) -> dict[str, Any]:
        """The configuration of one component.

        Raises:
            UserError: the component's folder or its config is missing or not JSON.
        """
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        return self._read_json(self.path / component / name)

    def require_weights(self, components: Sequence[str]) -> None:
        """Check that each component has safetensors files of the wanted variant.

        All of them are loaded in one variant; none stands in for another, as it does in diffusers.

        Raises:
            UserError: naming the component without weights and the variants there are.
        """
        for component in components:
            if files := self._weight_files(component):
                self._require_shards(component, {path.name for path in files})
                continue
            present = sorted(path.name for path in (self.path / component).glob("*") if path.is_file())
            plain = "without a variant in their names " if self._variants(component) else ""
            wanted = f"of variant {self.variant!r} " if self.variant else plain
            raise UserError(
                f"model.path: {self.path / component} holds no safetensors weights {wanted}"
                f"(files there: {', '.join(present) or 'none'}); {self._advice(components)}"
            )

    def _advice(self, components: Sequence[str]) -> str:
        """Which variant would do; where none does, which each component has."""
        there = {component: self._variants(component) for component in components}
        if of_all := sorted(set[str].intersection(*there.values())):
            return " or ".join(
                f"set model.variant: {one}" if one else "remove model.variant" for one in of_all
            )
        if not all(there.values()):
            return "complete the download, or check model.path and model.variant"
        listed = "; ".join(
            f"{component}: {', '.join(one or 'plain' for one in sorted(variants))}"
            for component, variants in there.items()
        )
        return (
            f"all components are loaded in one variant, and none is there for all of them ({listed}): get "
            "what is missing, or rename the files"
        )

    def _variants(self, component: str) -> set[str]:
        return {_variant_of(path.name) for path in (self.path / component).glob(f"*{_WEIGHT_SUFFIX}")}

    def require_files(self, component: str) -> None:
        """Check that a component's folder is there and holds something.

        Raises:
            UserError: naming the folder.
        """
        if not self._small_files(component):
            raise UserError(f"model.path: {self.path / component} is missing or empty; complete the download")

    def _require_shards(self, component: str, present: set[str]) -> None:
        for index in (self.path / component).glob("*.safetensors.index*.json"):
            listed = set(self._read_json(index).get("weight_map", {}).values())
            if listed & present and not listed <= present:
                raise UserError(
                    f"model.path: {self.path / component} lacks {', '.join(sorted(listed - present))}, "
                    f"which {index.name} lists; complete the download"
                )

    def fingerprint(self, component: str) -> str:
        """Hash that tells one component from another: its configuration and its weights.

        Covers the small files in full, and of each weight file its size, its header and evenly spaced
        blocks: a few milliseconds a file, also at 40 GB. Other weights of the same model differ everywhere; a
        file that was edited between the blocks goes unnoticed.
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in self._small_files(component):
            digest.update(path.name.encode() + path.read_bytes())
        for path in self._weight_files(component):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            stride = max(size // _SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES)
            with path.open("rb") as file:
                for offset in range(0, size, stride):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLED_BLOCK_BYTES))
        return digest.hexdigest()

    def fingerprints(self, *components: str) -> str:
        """The hashes of several components, in their order, for an identity that depends on all of them."""
        return " ".join(map(self.fingerprint, components))

    def _small_files(self, component: str) -> list[Path]:
        return sorted(path for path in (self.path / component).glob("*") if path.suffix in _SMALL_SUFFIXES)

    def _weight_files(self, component: str) -> list[Path]:
        wanted = self.variant or ""
        files = sorted((self.path / component).glob(f"*{_WEIGHT_SUFFIX}"))
        return [path for path in files if _variant_of(path.name) == wanted]

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"model.path: {self.path} is not a diffusers pipeline: "
                f"{path.relative_to(self.path)} is missing"
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"model.path: {path} cannot be read: {error}") from None
        if not isinstance(document, dict):
            raise UserError(f"model.path: {path} does not hold a JSON object")
        return document


def resolve_folder(
    location: str, *, revision: str | None = None, variant: str | None = None, with_weights: bool = True
) -> PipelineFolder:
    """The pipeline at a local folder, or downloaded from the hub into its cache.

    Args:
        location: a local folder, or a hub id such as ``Qwen/Qwen-Image``. A folder that exists wins.
        revision: branch, tag or commit on the hub.
        variant: weight variant, such as ``fp16``.
        with_weights: download the weights too, and not only settings and tokenizers.

    Raises:
        UserError: a missing local folder; a hub id that does not exist, is gated or cannot be reached.
    """
    local = Path(location).expanduser()
    if local.is_dir():
        if revision is not None:
            raise UserError(
                f"model.revision: {revision!r} has no effect on the local folder {location}; remove it"
            )
        return PipelineFolder(path=local, variant=variant)
    if local.exists():
        raise UserError(f"model.path: {location} is a file; give the pipeline's folder or a hub id")
    if _looks_local(location):
        raise UserError(f"model.path: there is no folder {location} (a hub id has the form owner/name)")
    # Of folders alone: FLUX.1 has its weights once more beside them, in files of another layout.
    weights = f"*/*.{variant}*{_WEIGHT_SUFFIX}" if variant else f"*/*{_WEIGHT_SUFFIX}"
    patterns = [*_SMALL_FILES, *([weights] if with_weights else [])]
    ignored = None if variant else list(_OTHER_VARIANTS)
    return PipelineFolder(path=_download(location, revision, patterns, ignored), variant=variant)


def _variant_of(name: str) -> str:
    """As in ``model.fp16.safetensors`` and ``model.fp16-00001-of-00002.safetensors``; else empty."""
    match = _VARIANT.search(name)
    return match[1] if match else ""


def _looks_local(location: str) -> bool:
    parts = location.split("/")
    return (
        location.startswith((".", "~", "/"))
        or "\\" in location
        or len(parts) != 2
        or not all(parts)
        or Path(parts[0]).is_dir()
    )


def _download(repository: str, revision: str | None, patterns: list[str], ignored: list[str] | None) -> Path:
    logger.info("Looking for %s on the hub (downloaded once, then read from the hub's cache).", repository)
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=ignored,
            )
        )
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
    except LocalEntryNotFoundError:
        raise UserError(
            f"model.path: the hub cannot be reached and {repository} is not in the local cache; "
            "check the network (or HF_HUB_OFFLINE), or give a local folder"
        ) from None
    except HFValidationError:
        raise UserError(f"model.path: {repository!r} is neither a local folder nor a valid hub id") from None
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"model.path: downloading {repository} failed: {error}") from None
