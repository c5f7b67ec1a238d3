"""This file lists what a run was asked for, how often it was started, what it left out, and what it left."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffsynth_lite.config import section_types
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.report.state import started_at

_FILES = {
    "lora": "the LoRA, and its model card",
    "lora_ema": "the moving average of the LoRA",
    "lora_best": "the LoRA with the lowest loss on held-out data",
    "previews": "previews by prompt and step; grid.png has all of them",
    "metrics.jsonl": "the numbers of the charts, a row a logged step",
    "items.jsonl": "the items whose losses are measured one by one",
    "item_losses.jsonl": "their losses by step",
    "sample_losses.jsonl": "the losses of samples that were trained on, by item",
    "layers.jsonl": "the update of each layer by step",
    "checkpoints": "what the run can be continued from",
    "config.yaml": "the settings as given",
    "resolved.yaml": "all settings, defaults included",
    "contract.json": "what makes this run what it is, which a resumed run must agree with",
    "lineage.json": "each start of the run",
    "status.json": "where the run is, for programs",
    "quarantine.jsonl": "items that cannot be used, and why",
    "trackers": "files of wandb and tensorboard",
}
_MAX_LISTED = 500


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that has another value than its default.

    Attributes:
        key: dotted.
        value: as yaml writes it.
    """

    key: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the run.

    Attributes:
        at: seconds since 1970; None where the entry has no time.
        step: that it began behind.
        machine: processes and device.
        versions: of packages.
        changes: settings that were changed then, from which value to which.
        chosen: settings that ``memory.auto`` chose.
    """

    at: float | None
    step: str
    machine: str
    versions: str
    changes: Sequence[str]
    chosen: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """An item that was not trained on."""

    item: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A file or folder that the run left."""

    name: str
    meaning: str
    size: str


def changed_settings(settings: Mapping[str, Any]) -> list[Setting]:
    """The settings that are not left at their defaults, in the order of the file.

    Args:
        settings: of ``resolved.yaml``.
    """
    defaults = {section: kind.defaults() for section, kind in section_types().items()}
    return [
        Setting(key=f"{section}.{name}", value=as_yaml(value))
        for section, values in settings.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if name not in defaults.get(section, {}) or _plain(defaults[section][name]) != _plain(value)
    ]


def all_settings(settings: Mapping[str, Any]) -> str:
    """All settings as yaml."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) if settings else ""


def starts(lineage: Sequence[Any]) -> list[Start]:
    """The starts of the run, the first one first; entries that are none are left out."""
    return [_start(entry) for entry in lineage if isinstance(entry, dict)]


def skipped(rows: Sequence[Mapping[str, Any]]) -> list[Skipped]:
    """The first of the items that cannot be used.

    Args:
        rows: of ``quarantine.jsonl``.
    """
    return [Skipped(item=str(row.get("item")), reason=str(row.get("reason"))) for row in rows[:_MAX_LISTED]]


def run_files(folder: Path) -> list[RunFile]:
    """What there is of the files that a run leaves, the LoRA first."""
    return [
        RunFile(name=name, meaning=meaning, size=format_bytes(_size(folder / name)))
        for name, meaning in _FILES.items()
        if (folder / name).exists()
    ]


def _start(entry: Mapping[str, Any]) -> Start:
    changed, chosen = _mapping(entry, "changed"), _mapping(entry, "chosen")
    versions = {**_mapping(entry, "versions"), "python": entry.get("python")}
    return Start(
        at=started_at(entry),
        step=str(entry.get("step")),
        machine=f"{entry.get('processes')} x {entry.get('device')}",
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        changes=[
            f"{key}: {as_yaml(change.get('from'))} to {as_yaml(change.get('to'))}"
            for key, change in changed.items()
            if isinstance(change, dict)
        ],
        chosen=[f"{key}: {as_yaml(value)}" for key, value in chosen.items()],
    )


def _mapping(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    held = entry.get(name)
    return held if isinstance(held, dict) else {}


def as_yaml(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    """A value as yaml gives it, which knows no tuples."""
    return list(value) if isinstance(value, tuple) else value


def _size(path: Path) -> int:
    """Bytes of a file, or of all in a folder; links are not followed, and what vanishes counts nothing."""
    total, found = 0, [path]
    while found:  # Not by recursion: somebody may have nested folders deeper than what may be called.
        place = found.pop()
        with suppress(OSError):
            if place.is_dir() and not place.is_symlink():
                found += place.iterdir()
            else:
                total += place.lstat().st_size
    return total
