"""A LoRA file is read back before it replaces the last one."""

import errno
import json
import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.lora.updates import LoraFile
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.lora_files import LoraFiles
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.wan import Wan
from diffsynth_lite.training.lora_file import export_lora
from diffsynth_lite.training.saver import Saver

LAYERS = ["transformer_blocks.0.attn.to_k", "transformer_blocks.0.attn.to_q"]
TENSORS = {
    f"{layer}.lora_{matrix}.weight": torch.arange(8.0).view(*shape) + 1
    for layer in LAYERS
    for matrix, shape in (("A", (2, 4)), ("B", (4, 2)))
}
SETTINGS = {"r": 2, "lora_alpha": 4, "target_modules": LAYERS}
MODEL = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 4, "joint_attention_dim": 4}


def describe(noise_range: tuple[float, float]) -> dict[str, str]:
    return {"noise": str(noise_range)}


@pytest.fixture
def family(tmp_path: Path) -> QwenImage:
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (pipeline / "transformer").mkdir()
    (pipeline / "transformer" / "config.json").write_text(json.dumps(MODEL | {"axes_dims_rope": [2, 2, 2]}))
    return QwenImage(PipelineFolder(path=pipeline))


def test_the_file_is_in_its_place_and_nothing_else_is_left(family: QwenImage, tmp_path: Path) -> None:
    (file,), _ = export_lora(family, tmp_path / "lora", TENSORS, SETTINGS, describe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "pipeline"]
    assert list((tmp_path / "lora").iterdir()) == [file]
    assert file == tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


def with_files(files: type[LoraFiles], family: QwenImage) -> QwenImage:
    """The family, with adapter files of another class."""
    other = QwenImage(family.folder)
    given = {of.name: getattr(family.lora_files, of.name) for of in fields(LoraFiles) if of.init}
    other.lora_files = files(**given)
    return other


class Careless(LoraFiles):
    """Writes something else than it was given."""

    change: str

    def save(self, folder, tensors, settings, **options) -> list[Path]:
        tensors, settings = dict(tensors), dict(settings)
        if self.change == "value":
            tensors = {name: tensor * (1 + 2**-20) for name, tensor in tensors.items()}
        elif self.change == "missing":
            tensors = {name: tensor for name, tensor in tensors.items() if LAYERS[0] in name}
        elif self.change == "alpha":
            settings.pop("lora_alpha")
        elif self.change == "names":
            self.spelling = Wan.lora_spelling
        return super().save(folder, tensors, settings, **options)


@pytest.mark.parametrize("change", ["value", "missing", "alpha", "names"])
def test_a_file_that_does_not_hold_the_adapter_never_replaces_a_good_one(
    family: QwenImage, tmp_path: Path, change: str
) -> None:
    (file,), _ = export_lora(family, tmp_path / "lora", TENSORS, SETTINGS, describe)
    before = file.read_bytes()
    careless = with_files(Careless, family)
    careless.lora_files.change = change
    with pytest.raises(RuntimeError, match="LoRA file"):
        export_lora(careless, tmp_path / "lora", TENSORS, SETTINGS, describe)
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "pipeline"]


def test_a_full_disk_is_the_systems_error_and_leaves_the_last_file(
    family: QwenImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,), _ = export_lora(family, tmp_path / "lora", TENSORS, SETTINGS, describe)
    before = file.read_bytes()

    def full(*_args: object, **_options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LoraFiles, "save", full)
    with pytest.raises(OSError, match="lora-writing") as caught:
        export_lora(family, tmp_path / "lora", TENSORS, SETTINGS, describe)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").read_bytes() == before


class OfItsOwn(LoraFiles):
    """Those of a family of whose models diffusers loads no LoRA."""

    _has_loader = False

    def save(self, folder, tensors, settings, **options) -> list[Path]:
        folder.mkdir()
        save_file(tensors, folder / "own.safetensors")
        return [folder / "own.safetensors"]

    def read(self, place) -> LoraFile:
        return load_file(place / "own.safetensors"), SETTINGS


def test_a_family_that_writes_files_of_its_own_reads_them_itself(family: QwenImage, tmp_path: Path) -> None:
    own = with_files(OfItsOwn, family)
    own.lora_files.settle(own.empty_transformer(), LAYERS, rank=2)
    (file,), _ = export_lora(own, tmp_path / "lora", TENSORS, SETTINGS, describe)
    assert file == tmp_path / "lora" / "own.safetensors"


def test_it_is_logged_when_float16_loses_more_than_bfloat16_would(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Saver.log_rounding_error(SimpleNamespace(_rounding=0.002, lora_dtype=torch.bfloat16))
        assert [record.levelname for record in caplog.records] == ["INFO"]
        Saver.log_rounding_error(SimpleNamespace(_rounding=0.02, lora_dtype=torch.float16))
    assert "is in float16: its update is that of the checkpoint to 2 %." in caplog.text
    assert "bfloat16 would lose less (output.lora_dtype)" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [4, 3])
def test_what_a_dtype_loses_of_the_update_is_measured(
    family: QwenImage, tmp_path: Path, dtype: torch.dtype, alpha: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in TENSORS.items()}
    settings = SETTINGS | {"lora_alpha": alpha}
    (file,), rounding = export_lora(family, tmp_path / "lora", tensors, settings, describe, dtype=dtype)
    stored = load_file(file)
    assert {tensor.dtype for tensor in stored.values()} == {dtype}

    def product(layer: str) -> torch.Tensor:
        down, up = (stored[f"transformer.{layer}.lora_{matrix}.weight"].double() for matrix in "AB")
        return up @ down

    updates = {
        layer: alpha
        / 2
        * tensors[f"{layer}.lora_B.weight"].double()
        @ tensors[f"{layer}.lora_A.weight"].double()
        for layer in LAYERS
    }
    lost = torch.cat([product(layer) - update for layer, update in updates.items()]).norm()
    expected = float(lost / torch.cat(list(updates.values())).norm())
    # The norms are those of float32, of the factors.
    assert rounding == pytest.approx(expected, rel=1e-4, abs=2e-7)
    assert (rounding == 0) == (dtype == torch.float32)
    assert rounding < 2 * torch.finfo(dtype).eps


def test_numbers_too_large_for_a_dtype_are_refused_with_what_would_do(
    family: QwenImage, tmp_path: Path
) -> None:
    large = {name: tensor * 10_000 for name, tensor in TENSORS.items()}
    with pytest.raises(
        RunStoppedError, match=r"float16 holds nothing above 65504, and the LoRA has a 160000; .*bfloat16"
    ):
        export_lora(family, tmp_path / "lora", large, SETTINGS, describe, dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipeline"]


def test_small_numbers_lose_more_in_float16(family: QwenImage, tmp_path: Path) -> None:
    small = {name: tensor * (2**-24 if "lora_B" in name else 1) for name, tensor in TENSORS.items()}
    rounding = {
        dtype: export_lora(
            family, tmp_path / "lora", small, SETTINGS | {"lora_alpha": 1}, describe, dtype=dtype
        )[1]
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert rounding[torch.bfloat16] == 0
    assert 0.05 < rounding[torch.float16] < 0.2
