"""This file finds the base models on this disk, with who uses them, and deletes those of the hub's cache."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from diffsynth_lite.config import Config
from diffsynth_lite.config.files import recipe_table_file
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import require_file

_INDEX = "modular_model_index.json"
"""Of a pipeline whose components may lie in other repositories."""
_MOST_CARD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on this disk.

    Attributes:
        name: its id on the hub; of a folder or file of the person its path, as configs have it.
        is_of_hub: whether it is in the hub's cache, from which it can be deleted.
        licence: empty where nothing here names it.
        configs: names of those that use it.
    """

    name: str
    is_of_hub: bool
    num_bytes: int
    licence: str
    configs: Sequence[str]


def models(configs: Mapping[str, Config], workspace: Path) -> list[Model]:
    """The models in the hub's cache, then those elsewhere that configs name.

    Args:
        workspace: from which relative paths of configs go.
    """
    _, repos = _scan()
    licences = {row["model"]: row["licence"] for row in json.loads(recipe_table_file().read_text("utf-8"))}
    used = {name: _used(config, repos, workspace) for name, config in configs.items()}
    found = [
        Model(
            name=repo.repo_id,
            is_of_hub=True,
            num_bytes=repo.size_on_disk,
            licence=_licence(repo) or licences.get(repo.repo_id, ""),
            configs=[name for name, ids in used.items() if repo.repo_id in ids],
        )
        for repo in repos
    ]
    users: dict[Path, list[str]] = {}
    for name, config in configs.items():
        for path in {folder_of(place, workspace) for place in _places(config)}:
            if path.exists() and not any(path.is_relative_to(repo.repo_path) for repo in repos):
                users.setdefault(path, []).append(name)
    found += [
        Model(name=str(path), is_of_hub=False, num_bytes=bytes_in(path), licence="", configs=names)
        for path, names in users.items()
    ]
    return sorted(found, key=lambda model: (not model.is_of_hub, -model.num_bytes))


def delete_model(name: str, busy: Sequence[tuple[str, Config]], workspace: Path) -> int:
    """Delete a model from the hub's cache, as the hub's own program does; returns the bytes that are freed.

    Args:
        busy: names and configs of the runs that train or wait.

    Raises:
        UserError: it is not in the cache, or one of these runs uses it.
    """
    cache, repos = _scan()
    repo = next((repo for repo in repos if repo.repo_id == name), None)
    if repo is None:
        raise UserError(f"{name}: is not in the hub's cache")
    if users := [run for run, config in busy if name in _used(config, repos, workspace)]:
        raise UserError(f"{name}: {users[0]} trains on it, or waits to; stop it first")
    # Copies of a repository share its commits, and the library deletes from the first that has one.
    only = replace(cache, repos=frozenset({repo}))
    strategy = only.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
    strategy.execute()
    return int(strategy.expected_freed_size)


def bytes_in(path: Path) -> int:
    """Size of a file, or of all files below a folder; what vanishes meanwhile is left out."""
    files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names] or [path]
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def folder_of(place: str, workspace: Path) -> Path:
    """Where a path in a config leads."""
    try:
        return (workspace / Path(place).expanduser()).resolve()
    except (OSError, RuntimeError):  # a link to itself, the home of nobody
        return workspace / place


def _scan() -> tuple[Any, list[Any]]:
    """The hub's cache as its library describes it, and the models in it."""
    # Imported here: it takes 20 MB of memory, and who never looks at models needs none of it.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):  # the latter where a file is in its place
        return None, []
    return cache, [repo for repo in cache.repos if repo.repo_type == "model"]


def _places(config: Config) -> list[str]:
    """What a config names as its model: hub ids, folders and files."""
    model = config.model
    named = (model.path, model.transformer_file, model.transformer_2_file, model.training_adapter)
    return [place for place in named if place]


def _used(config: Config, repos: Sequence[Any], workspace: Path) -> set[str]:
    """Ids of the repositories that a config needs: that it names, is in, or that an index of those names."""
    places = _places(config)
    paths = [folder_of(place, workspace) for place in places]
    own = [
        repo
        for repo in repos
        if repo.repo_id in places or any(path.is_relative_to(repo.repo_path) for path in paths)
    ]
    indexes = [revision.snapshot_path / _INDEX for repo in own for revision in repo.revisions]
    text = "".join(index.read_text("utf-8", "replace") for index in indexes if index.is_file())
    return {repo.repo_id for repo in repos if repo in own or f'"{repo.repo_id}"' in text}


def _licence(repo: Any) -> str:
    """The licence that the model's card in the cache names; empty where there is none."""
    from huggingface_hub.repocard import metadata_load

    for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
        card = revision.snapshot_path / "README.md"
        try:
            require_file(card, most_bytes=_MOST_CARD_BYTES)
            header = metadata_load(card) or {}
        except (OSError, ValueError, UserError, RecursionError, yaml.YAMLError):
            continue
        if named := header.get("license_name") or header.get("license"):
            return str(named)
    return ""
