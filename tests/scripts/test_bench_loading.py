"""The benchmark of loading loads what it wrote, and sees memory that is held."""

import time
from pathlib import Path

import pytest
import streamed_loading
import torch
from loading import NUM_FILES, load, measure, rows_of, write_model

from diffsynth_lite.core.weights import QuantizationReport

MIB = 2**20


@pytest.mark.parametrize(("component", "num_layers"), [("transformer", 28), ("text_encoder", 19)])
def test_a_model_is_written_in_several_files_and_loaded_in_a_format(
    tmp_path: Path, component: str, num_layers: int
) -> None:
    write_model(tmp_path, component, 2, 128, torch.float32)
    assert 1 < len(list((tmp_path / component).glob("*.safetensors"))) <= NUM_FILES
    plain, quantised = (load(tmp_path, component, name) for name in ("none", "int8"))
    assert QuantizationReport.of(plain).num_layers == 0
    assert QuantizationReport.of(quantised).num_layers == num_layers


def test_a_model_is_loaded_with_its_blocks_in_host_memory(tmp_path: Path) -> None:
    write_model(tmp_path, "transformer", 3, 128, torch.float32)
    plain = load(tmp_path, "transformer", "int8")
    streamed, stream = streamed_loading.load(tmp_path, "int8", streamed_loading.own_memory)
    assert stream.report().blocks_streamed == 3
    in_blocks = sum(value.nbytes for value in plain.transformer_blocks.parameters())
    assert in_blocks <= stream.host_bytes < 1.1 * in_blocks
    assert list(streamed.transformer_blocks.parameters()) == []


def test_memory_that_is_held_for_a_moment_is_seen() -> None:
    def run() -> torch.nn.Module:
        for _ in range(5):
            held = torch.ones(64 * MIB, dtype=torch.uint8)
            time.sleep(0.01)  # on a busy machine the thread that looks at it gets its turn then
            del held
        return torch.nn.Linear(512, 1024, bias=False)

    loaded = measure(run)
    assert loaded.kept == 2 * MIB
    assert loaded.peak > 32 * MIB  # one of them at a time, or most of one: it is looked at each millisecond
    (row,) = rows_of({("int8", "float32"): loaded})
    assert row["kept, MiB"] == "2.0"
