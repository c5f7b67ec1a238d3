"""The facts of a machine, on the machine at hand."""

import shutil
from pathlib import Path

import diffusers
import torch

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.doctor.tables import machine_table


def test_versions_memory_devices_and_disk_are_told(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    facts = machine_table([missing])
    assert f"torch {torch.__version__}" in facts["packages"]
    assert f"diffusers {diffusers.__version__}" in facts["packages"]
    assert facts["free memory"].endswith("GiB")
    assert any(name.startswith("GPU") for name in facts)
    assert facts["free disk"] == f"{format_bytes(shutil.disk_usage(tmp_path).free)} at {missing}"
