"""The benchmark of loading loads what it wrote, and sees memory that is held."""

from pathlib import Path

import torch
from loading import NUM_FILES, load, measure, rows_of, write_model

from diffsynth_lite.core.weights import QuantizationReport

MIB = 2**20


def test_a_model_is_written_in_several_files_and_loaded_in_a_format(tmp_path: Path) -> None:
    write_model(tmp_path, 2, 128, torch.float32)
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) == NUM_FILES
    plain, quantised = (load(tmp_path, name) for name in ("none", "int8"))
    assert QuantizationReport.of(plain).num_layers == 0
    assert QuantizationReport.of(quantised).num_layers == 28


def test_memory_that_is_held_for_a_moment_is_seen() -> None:
    def run() -> torch.nn.Module:
        for _ in range(3):
            torch.ones(64 * MIB, dtype=torch.uint8)
        return torch.nn.Linear(512, 1024, bias=False)

    loaded = measure(run)
    assert loaded.kept == 2 * MIB
    assert loaded.peak > 32 * MIB  # one of them at a time, or most of one: it is looked at each millisecond
    (row,) = rows_of({("int8", "float32"): loaded})
    assert row["model, MiB"] == "2.0"
