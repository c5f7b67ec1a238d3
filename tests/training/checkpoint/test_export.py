"""A LoRA file is read back before it replaces the last one."""

from pathlib import Path

import pytest
import torch

from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.checkpoint.lora_file import export_lora

TENSORS = {
    "transformer_blocks.0.attn.to_q.lora_A.weight": torch.arange(8.0).view(2, 4),
    "transformer_blocks.0.attn.to_q.lora_B.weight": torch.arange(6.0).view(3, 2),
}
SETTINGS = {"r": 2, "lora_alpha": 4, "target_modules": ["transformer_blocks.0.attn.to_q"]}


def describe(noise_range: tuple[float, float]) -> dict[str, str]:
    return {"noise": str(noise_range)}


@pytest.fixture
def family(tmp_path: Path) -> QwenImage:
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    return QwenImage(PipelineFolder(path=pipeline))


def test_the_file_is_in_its_place_and_nothing_else_is_left(family: QwenImage, tmp_path: Path) -> None:
    (file,) = export_lora(family, tmp_path / "lora", TENSORS, SETTINGS, describe)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "lora",
        "lora/pytorch_lora_weights.safetensors",
        "pipeline",
        "pipeline/model_index.json",
    ]
    assert file == tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


class Careless(QwenImage):
    """Writes something else than it was given."""

    change: str

    def save_lora(self, folder, tensors, settings) -> list[Path]:
        tensors, settings = dict(tensors), dict(settings)
        if self.change == "value":
            tensors = {name: tensor + 1 for name, tensor in tensors.items()}
        elif self.change == "missing":
            tensors.popitem()
        elif self.change == "alpha":
            settings.pop("lora_alpha")
        return super().save_lora(folder, tensors, settings)


@pytest.mark.parametrize("change", ["value", "missing", "alpha"])
def test_a_file_that_does_not_hold_the_adapter_never_replaces_a_good_one(
    family: QwenImage, tmp_path: Path, change: str
) -> None:
    before = export_lora(family, tmp_path / "lora", TENSORS, SETTINGS, describe)[0].read_bytes()
    careless = Careless(family.folder)
    careless.change = change
    with pytest.raises(RuntimeError, match="LoRA file"):
        export_lora(careless, tmp_path / "lora", TENSORS, SETTINGS, describe)
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "pipeline"]
