"""The facts of a machine, on the machine at hand."""

import shutil
from pathlib import Path

import diffusers
import torch

from diffsynth_lite.doctor.machine import describe_machine, in_gib


def test_versions_memory_devices_and_disk_are_told(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    facts = describe_machine([missing])
    assert f"torch {torch.__version__}" in facts["packages"]
    assert f"diffusers {diffusers.__version__}" in facts["packages"]
    assert facts["free memory"].endswith("GiB")
    assert any(name.startswith("GPU") for name in facts)
    assert facts["free disk"] == f"{in_gib(shutil.disk_usage(tmp_path).free)} at {missing}"


def test_bytes_are_told_in_the_unit_that_suits_them() -> None:
    assert [in_gib(size) for size in (512, 3 * 2**20, 1.5 * 2**30)] == ["0.5 KiB", "3.0 MiB", "1.5 GiB"]
