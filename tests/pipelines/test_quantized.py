"""What is read when blocks are quantised: which files, which components, and what is refused."""

import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch
from family_sample import CPU
from release_layouts import two_experts

from diffsynth_lite.core.weights import FrozenLinear, Int8, Quantization, QuantizationReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, qwen_image, sdxl
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.sdxl import SDXL
from diffsynth_lite.pipelines.wan import Wan

LAYER = "transformer_blocks.0.attn.to_q"


def quantised(family: ModelFamily, *layers: str) -> ModelFamily:
    """The family with these layers in int8, or all that it can have."""
    part = family.parts_of(family.empty_transformer())[family.trained[0]]
    chosen = layers or tuple(quantizable_layers(part, family.block_lists))
    family.quantization = Quantization(format=Int8(), layers=chosen, device=CPU)
    return family


def frozen_layers(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]


@pytest.fixture
def folder(tmp_path: Path) -> PipelineFolder:
    qwen_image.tiny().save_pretrained(tmp_path)
    return PipelineFolder(path=tmp_path)


def weights_file(folder: PipelineFolder) -> Path:
    return folder.path / "transformer" / "diffusion_pytorch_model.safetensors"


def change_weights(folder: PipelineFolder, **changes: torch.Tensor | None) -> None:
    tensors = safetensors.torch.load_file(weights_file(folder))
    kept = {name: value for name, value in (tensors | changes).items() if value is not None}
    safetensors.torch.save_file(kept, weights_file(folder))


def test_only_the_layers_that_are_named_are_quantised(folder: PipelineFolder) -> None:
    model = quantised(QwenImage(folder), LAYER).load_transformer(torch.float32)
    assert frozen_layers(model) == [LAYER]


def test_files_of_several_parts_and_of_a_variant_give_the_same_model(tmp_path: Path) -> None:
    pipeline = qwen_image.tiny()
    pipeline.save_pretrained(tmp_path / "one")
    pipeline.save_pretrained(tmp_path / "parts", variant="fp16", max_shard_size="100KB")
    parts = PipelineFolder(path=tmp_path / "parts", variant="fp16")
    assert len(parts.files_to_load("transformer")) > 1
    # Neither of them is that of the variant.
    stray = parts.path / "transformer" / "diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file({"stray": torch.zeros(1)}, stray)
    states = [
        quantised(QwenImage(one)).load_transformer(torch.float32).state_dict()
        for one in (PipelineFolder(path=tmp_path / "one"), parts)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_weights_that_do_not_fit_are_refused_as_without_quantisation(folder: PipelineFolder) -> None:
    change_weights(folder, **{f"{LAYER}.weight": torch.zeros(3, 3), "proj_out.bias": None})
    messages = []
    for family in (QwenImage(folder), quantised(QwenImage(folder))):
        with pytest.raises(UserError, match="2 of a QwenImageTransformer2DModel are missing") as caught:
            family.load_transformer(torch.float32)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_damaged_file_is_refused(folder: PipelineFolder) -> None:
    weights_file(folder).write_bytes(weights_file(folder).read_bytes()[:-1000])
    with pytest.raises(UserError, match="transformer cannot be read"):
        quantised(QwenImage(folder)).load_transformer(torch.float32)


def test_weights_that_are_not_finite_are_refused_by_name(folder: PipelineFolder) -> None:
    shape = QwenImage(folder).load_transformer(torch.float32).get_submodule(LAYER).weight.shape
    change_weights(folder, **{f"{LAYER}.weight": torch.full(shape, torch.nan)})
    with pytest.raises(UserError, match=rf"{LAYER}\.weight holds numbers that are not finite"):
        quantised(QwenImage(folder)).load_transformer(torch.float32)


def test_tensors_that_no_model_has_are_named_in_a_warning(
    folder: PipelineFolder, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(folder, extra=torch.zeros(2))
    with caplog.at_level(logging.WARNING):
        quantised(QwenImage(folder)).load_transformer(torch.float32)
    assert "1 tensors in" in caplog.text
    assert "are not used, such as extra" in caplog.text


def test_both_experts_are_quantised_also_the_one_that_is_read_for_previews_alone(tmp_path: Path) -> None:
    two_experts().save_pretrained(tmp_path)
    folder = PipelineFolder(path=tmp_path)
    both = quantised(Wan(folder)).load_transformer(torch.float32)
    of_each = [frozen_layers(part) for part in both.children()]
    assert of_each[0] == of_each[1] != []
    low = quantised(Wan(folder, trained=["transformer_2"]))
    drawn_with = low._transformers(low.load_transformer(torch.float32))
    assert [frozen_layers(drawn_with[name]) for name in ("transformer", "transformer_2")] == of_each


def test_text_encoders_that_are_trained_stay_as_they_are(tmp_path: Path) -> None:
    sdxl.tiny().save_pretrained(tmp_path)
    family = quantised(
        SDXL(PipelineFolder(path=tmp_path), trained=("unet", "text_encoder", "text_encoder_2"))
    )
    model = family.load_transformer(torch.float32)
    layers = frozen_layers(model)
    assert layers
    assert all(name.startswith("unet.") for name in layers)
    assert QuantizationReport.of(model).num_layers == len(layers)


def test_layers_that_diffusers_keeps_in_fp32_are_not_quantised(
    folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = QwenImage(folder)
    every = quantizable_layers(family.empty_transformer(), family.block_lists)
    monkeypatch.setattr(family.transformer_class, "_keep_in_fp32_modules", ["img_mod"])
    left = quantizable_layers(family.empty_transformer(), family.block_lists)
    assert set(every) - set(left) == {f"transformer_blocks.{block}.img_mod.1" for block in range(2)}
    model = quantised(family).load_transformer(torch.bfloat16)
    assert model.get_submodule("transformer_blocks.0.img_mod.1").weight.dtype == torch.float32
    assert model.get_submodule("transformer_blocks.0.txt_mod.1").bias.dtype == torch.bfloat16
