"""This file checks that all processes were started for one run: with its settings, programs, model and data.

Machines may have folders of their own, so that paths may differ; their content may not.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from diffsynth_lite import __version__
from diffsynth_lite.config import Config
from diffsynth_lite.data.item_table import ItemTable
from diffsynth_lite.data.records import ROLES
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.redaction import redacted
from diffsynth_lite.training.distributed.agreement import on_all_processes

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
_OWN_TO_A_MACHINE = frozenset(
    [
        *("path", "transformer_file", "transformer_2_file", "init_from", "training_adapter", "model_path"),
        *("dir", "copy_to", "cache_dir", "sealed", "source", "metadata", *(role.folder for role in ROLES)),
        *("validation.data", "inputs", "last_frames", "control", "inpaint_masks", "faces", "score_models"),
        *("num_workers", "cpu_threads"),
    ]
)
"""Settings that need not be equal, by the last part of their keys: paths, and numbers of workers."""
_MAX_SHOWN = 60
"""Letters of a value in a message."""


def package_versions() -> dict[str, str]:
    """The versions of the packages that decide the numbers of a run, this package first."""
    return {"diffsynth_lite": __version__} | {name: version(name) for name in _PACKAGES}


def require_same_settings(accelerator: Accelerator, config: Config) -> None:
    """Check that all processes have the same settings and the same versions of packages."""

    def facts() -> dict[str, Any]:
        versions = package_versions()
        versions["diffsynth_lite"] += f" (sources {_sources_digest()})"
        return dict(_settings(config.model_dump())) | versions

    _require_same(accelerator, facts, "start all of them with one config and the same packages")


def require_same_model(accelerator: Accelerator, family: ModelFamily) -> None:
    """Check that all processes have the same base model."""

    def facts() -> dict[str, Any]:
        parts = (*family.components, "scheduler")
        return {f"{part} of model.path": family.folder.fingerprint(part) for part in parts}

    _require_same(accelerator, facts, "have model.path hold the same files on each machine")


def require_same_items(accelerator: Accelerator, trained: ItemTable, measured: ItemTable) -> None:
    """Check that all processes have the same items."""

    def facts() -> dict[str, Any]:
        tables = {"data": trained, "validation.data": measured}
        return {
            f"{what} of {key}": fact for key, table in tables.items() for what, fact in table.facts().items()
        }

    _require_same(accelerator, facts, "have the data hold the same files and captions on each machine")


def _require_same(accelerator: Accelerator, facts: Callable[[], Mapping[str, Any]], remedy: str) -> None:
    """Check that facts are the same on all processes.

    A digest of them is exchanged; the facts themselves only where that differs.
    """
    if accelerator.num_processes == 1:
        return
    held: dict[str, str] = {}

    def digest() -> str:
        held.update((key, json.dumps(fact)) for key, fact in redacted(dict(facts())).items())
        return hashlib.blake2b(json.dumps(held, sort_keys=True).encode(), digest_size=16).hexdigest()

    if len(set(on_all_processes(accelerator, digest))) > 1:
        everywhere = gather_object([(socket.gethostname(), held)])
        raise UserError(f"the processes of this run differ: {_differences(everywhere)}; {remedy}")


def _differences(everywhere: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """The differing facts (as JSON, by machine) in one line."""
    keys = dict.fromkeys(key for _, facts in everywhere for key in facts)
    found = []
    for key in keys:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(everywhere):
            ranks_by_value.setdefault(facts.get(key, "missing"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = (f"{_short(value)} on {_places(everywhere, at)}" for value, at in ranks_by_value.items())
            found.append(f"{key} is {', '.join(values)}")
    return join_names(found)


def _short(value: str) -> str:
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."


def _places(everywhere: Sequence[tuple[str, object]], ranks: Sequence[int]) -> str:
    """Some processes, by machine: all of them of a few, else how many."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(everywhere[rank][0], []).append(rank)
    parts = []
    for host, at in by_host.items():
        named = ", ".join(map(str, at)) if len(at) <= 8 else f"{at[0]} and {len(at) - 1} more"
        parts.append(f"process {named} ({host})")
    return join_names(parts)


def _settings(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All settings that must be equal, by dotted key."""
    if key in _OWN_TO_A_MACHINE or key.rpartition(".")[2] in _OWN_TO_A_MACHINE:
        return
    if isinstance(values, list) and values and isinstance(values[0], dict):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield key, values
        return
    for name, value in values.items():
        yield from _settings(value, f"{key}.{name}" if key else str(name))


def _sources_digest() -> str:
    """Of this package's own files: a clone changes more often than its version."""
    digest = hashlib.blake2b(digest_size=4)
    package = Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()
