"""No altered checkpoint is ever read: each file mutated in each way, and manifests made by hand."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damages import CERTAIN, RANDOM

from diffsynth_lite.errors import CheckpointError
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore

FILES = ("adapter.safetensors", "optimizer.safetensors", "state.json", "contract.json", "COMPLETE")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    tensors = {"adapter": {"a": torch.arange(12.0)}, "optimizer": {"a::exp_avg": torch.arange(12.0) / 7}}
    documents = {"state": {"step": 7}, "contract": {"rank": 4, "targets": ["to_q", "to_k"]}}
    return CheckpointStore(tmp_path, keep=1).save(7, tensors, documents)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("mutate", [*RANDOM, *CERTAIN])
def test_a_checkpoint_with_an_altered_file_is_never_read(
    good: Path, file: str, mutate: Callable[[Path, random.Random], None]
) -> None:
    dice = random.Random(f"{file} {mutate.__name__}")
    for attempt in range(25 if mutate in RANDOM else 1):
        altered = good.parent / f"altered {attempt}" / good.name
        shutil.copytree(good, altered)
        mutate(altered / file, dice)
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(altered)
        assert str(altered) in str(caught.value)
    assert read_checkpoint(good).step == 7


def sign(path: Path, line: bytes) -> None:
    path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


def listed(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize(
    "name", ["../state.json", "/etc/passwd", "sub/state.json", "..", "state.json\0", "state.pkl"]
)
def test_a_manifest_cannot_point_outside_its_folder_or_at_other_kinds_of_files(good: Path, name: str) -> None:
    document = json.loads((good / "COMPLETE").read_text().splitlines()[0])
    document["files"][name] = listed((good / "state.json").read_bytes())
    sign(good / "COMPLETE", json.dumps(document).encode())
    with pytest.raises(CheckpointError, match="not a manifest of ours"):
        read_checkpoint(good)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"7",
        b"not json",
        b"\xff\xfe",
        b'{"schema": 1}',
        b'{"schema": 1, "step": 7, "files": []}',
        b'{"schema": 1, "step": 7, "files": {"state.json": 3}}',
        b'{"schema": 1, "step": 7, "files": {"state.json": {"bytes": 1}}}',
    ],
)
def test_a_signed_manifest_of_another_form_is_refused(good: Path, line: bytes) -> None:
    sign(good / "COMPLETE", line)
    with pytest.raises(CheckpointError, match="COMPLETE is not a manifest of ours"):
        read_checkpoint(good)


def test_a_checkpoint_of_a_later_schema_says_so(good: Path) -> None:
    document = json.loads((good / "COMPLETE").read_text().splitlines()[0])
    sign(good / "COMPLETE", json.dumps(document | {"schema": 2}).encode())
    with pytest.raises(CheckpointError, match="schema 2; this version of diffsynth_lite reads 1"):
        read_checkpoint(good)


def test_a_file_that_cannot_be_read_makes_the_checkpoint_unusable(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Input/output error"):
        read_checkpoint(good)
