"""What is read when blocks or text encoders are quantised: which files, which layers, and what is refused."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from family_sample import CPU
from lazy_backend import LazyBackend
from release_layouts import two_experts
from torch import Tensor, nn

from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization, QuantizationReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_json
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, qwen_image, sdxl, wan
from diffsynth_lite.pipelines.base import text_encoders, transformers_loading
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.base.text_encoders import (
    TextEncoderMemory,
    quantizable_encoder_layers,
    transformer_layers,
)
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


def change_weights(folder: PipelineFolder, changes: Mapping[str, Tensor | None]) -> None:
    tensors: dict[str, Tensor | None] = {**safetensors.torch.load_file(weights_file(folder))}
    kept = {name: value for name, value in (tensors | dict(changes)).items() if value is not None}
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


def test_a_damaged_file_is_refused(folder: PipelineFolder) -> None:
    weights_file(folder).write_bytes(weights_file(folder).read_bytes()[:-1000])
    with pytest.raises(UserError, match="transformer cannot be read"):
        quantised(QwenImage(folder)).load_transformer(torch.float32)


def test_tensors_that_no_model_has_are_named_in_a_warning(
    folder: PipelineFolder, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(folder, {"extra": torch.zeros(2)})
    with caplog.at_level(logging.WARNING):
        quantised(QwenImage(folder)).load_transformer(torch.float32)
    assert "1 tensors in" in caplog.text
    assert "are not used, such as extra" in caplog.text


def test_both_experts_are_quantised_also_the_one_that_is_read_only_for_previews(tmp_path: Path) -> None:
    two_experts().save_pretrained(tmp_path)
    folder = PipelineFolder(path=tmp_path)
    both = quantised(Wan(folder)).load_transformer(torch.float32)
    of_each = [frozen_layers(part) for part in both.children()]
    assert of_each[0] == of_each[1] != []
    low = quantised(Wan(folder, trained=["transformer_2"]))
    drawn_with = low.preview_models(low.load_transformer(torch.float32))
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


ENCODER_LAYER = "model.language_model.layers.0.self_attn.q_proj"
STORED_AS = "model.layers.0.self_attn.q_proj"


def with_quantised_encoder(family: ModelFamily) -> ModelFamily:
    """The family with its text encoder's transformer layers in int8."""
    layers = quantizable_encoder_layers(family.empty_component("text_encoder"))
    chosen = Quantization(format=Int8(), layers=tuple(layers), device=CPU)
    family.text_encoder_memory = TextEncoderMemory(quantizations={"text_encoder": chosen})
    return family


def change_encoder(folder: PipelineFolder, changed: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Write the text encoder's file again, with some tensors changed or left out; what it holds then."""
    file = folder.path / "text_encoder" / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**safetensors.torch.load_file(file), **changed}
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.torch.save_file(kept, file, {"format": "pt"})
    return kept


def load_encoder(folder: PipelineFolder) -> nn.Module:
    encoder: nn.Module = with_quantised_encoder(QwenImage(folder)).load_component(
        "text_encoder", torch.float32
    )
    return encoder


def test_files_of_earlier_and_later_versions_of_transformers_give_the_same_model(
    folder: PipelineFolder,
) -> None:
    states = [load_encoder(folder).state_dict()]
    stored = change_encoder(folder, {})
    assert f"{STORED_AS}.weight" in stored
    later = {
        name.replace("visual.", "model.visual.")
        .replace("model.layers", "model.language_model.layers")
        .replace("model.norm", "model.language_model.norm")
        .replace("model.embed", "model.language_model.embed"): value
        for name, value in stored.items()
    }
    assert f"{ENCODER_LAYER}.weight" in later
    change_encoder(folder, {**dict.fromkeys(stored), **later})
    states.append(load_encoder(folder).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_layers_of_images_are_a_stack_of_their_own(folder: PipelineFolder) -> None:
    encoder = QwenImage(folder).empty_component("text_encoder")
    kinds = [{type(layer).__name__ for layer in stack} for stack in transformer_layers(encoder)]
    assert kinds == [{"Qwen2_5_VLVisionBlock"}, {"Qwen2_5_VLDecoderLayer"}]
    memory = TextEncoderMemory(num_slots=1)
    assert memory.streamed_layers([encoder]) == transformer_layers(encoder)
    assert TextEncoderMemory(num_slots=2).streamed_layers([encoder]) == []
    assert TextEncoderMemory().streamed_layers([encoder]) == []


def test_what_transformers_keeps_in_fp32_is_not_quantised(tmp_path: Path) -> None:
    wan.tiny().save_pretrained(tmp_path)
    encoder = with_quantised_encoder(Wan(PipelineFolder(path=tmp_path))).load_component(
        "text_encoder", torch.bfloat16
    )
    assert QuantizationReport.of(encoder).num_layers == 12
    # Its input is cast to the dtype of its weight, which in a format holds no numbers to compute with.
    assert encoder.get_submodule("encoder.block.0.layer.1.DenseReluDense.wo").weight.dtype == torch.bfloat16


def loads(folder: PipelineFolder, component: str) -> list[Callable[[], object]]:
    """Loading the model, or the text encoder, as it is and with its blocks quantised."""
    plain = QwenImage(folder)
    if component == "transformer":
        families = plain, quantised(QwenImage(folder))
        return [partial(one.load_transformer, torch.float32) for one in families]
    return [partial(plain.load_component, component, torch.float32), partial(load_encoder, folder)]


@pytest.mark.parametrize(
    ("component", "stored", "loaded", "model"),
    [
        ("transformer", LAYER, LAYER, "QwenImageTransformer2DModel"),
        ("text_encoder", STORED_AS, ENCODER_LAYER, "Qwen2_5_VLForConditionalGeneration"),
    ],
)
def test_weights_that_do_not_fit_or_are_not_finite_are_refused_as_without_quantisation(
    folder: PipelineFolder, component: str, stored: str, loaded: str, model: str
) -> None:
    change = change_encoder if component == "text_encoder" else change_weights
    tensors = safetensors.torch.load_file(next((folder.path / component).glob("*.safetensors")))
    weight, bias = tensors[f"{stored}.weight"], f"{stored}.bias"
    change(folder, {f"{stored}.weight": torch.zeros(3, 3), bias: None})
    messages = []
    for load in loads(folder, component):
        with pytest.raises(UserError, match=f"2 of a {model} are missing") as caught:
            load()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    nowhere_finite = torch.full_like(weight, torch.nan)
    change(folder, {f"{stored}.weight": nowhere_finite, bias: tensors[bias]})
    words = rf"^model\.path: .*safetensors: .*{loaded}\.weight holds numbers that are not finite"
    with pytest.raises(UserError, match=words):
        loads(folder, component)[1]()


def test_weights_that_are_quantised_already_are_refused(folder: PipelineFolder) -> None:
    config = folder.component_config("text_encoder") | {
        "quantization_config": {"quant_method": "bitsandbytes"}
    }
    write_json(folder.path / "text_encoder" / "config.json", config)
    with pytest.raises(UserError, match="text_encoder are quantised already"):
        load_encoder(folder)


def test_weights_that_transformers_would_compute_from_others_are_refused(
    folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = transformers_loading._StandIn.__getitem__
    # As its converters do, of which the present version has none for these models.
    monkeypatch.setattr(
        transformers_loading._StandIn, "__getitem__", lambda tensor, place: convert(tensor, place) + 0
    )
    with pytest.raises(UserError, match=r"computes .* of a Qwen2_5_VLForConditionalGeneration from other"):
        load_encoder(folder)


@pytest.mark.parametrize("settings", [{"num_slots": 1}, {}])
def test_a_family_that_loads_its_text_encoder_by_itself_is_refused(
    folder: PipelineFolder, settings: dict[str, Any]
) -> None:
    memory = (
        TextEncoderMemory(**settings)
        if settings
        else with_quantised_encoder(QwenImage(folder)).text_encoder_memory
    )
    with pytest.raises(
        UserError, match="no effect, as this family loads its text encoder in a way of its own"
    ):
        memory.watched(lambda: lambda prompts: prompts)


def test_what_was_done_is_logged_once_after_the_first_prompt(
    folder: PipelineFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    family = with_quantised_encoder(QwenImage(folder))
    given = family.text_encoder_memory.quantizations
    family.text_encoder_memory = memory = TextEncoderMemory(quantizations=given, num_slots=1)
    encode = memory.watched(lambda: family.load_prompt_encoder(torch.float32, CPU))
    assert not caplog.messages
    for text in ("a red circle", "a ring"):
        encode([Prompt(text=text)])
    quantised_line, streamed_line = caplog.messages
    assert quantised_line.startswith("text encoder, first caption: quantised 24 layers, ")
    assert streamed_line.startswith("text encoder, first caption: streamed 4 blocks, ")
    # The two layers of the text ran; with one slot each waits for its copy.
    assert "; 2 copies, " in streamed_line
    assert streamed_line.endswith(", 2 late")


def test_too_little_host_memory_is_refused(folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoders, "backend_for", lambda _device: LazyBackend(host_bytes=0))
    family = QwenImage(folder)
    family.text_encoder_memory = TextEncoderMemory(num_slots=1)
    with pytest.raises(UserError, match=r"memory\.stream_text_encoder: the system refused .* of host memory"):
        family.load_prompt_encoder(torch.float32, CPU)


def test_a_stream_that_moves_nothing_is_an_error(folder: PipelineFolder) -> None:
    memory = TextEncoderMemory(num_slots=1)
    encoder = QwenImage(folder).load_component("text_encoder", torch.float32)

    def load_and_never_run() -> Any:
        memory.place([encoder], CPU)
        return lambda prompts: prompts

    encode = memory.watched(load_and_never_run)
    with pytest.raises(UserError, match=r"memory\.stream_text_encoder: on, but no weights were moved"):
        encode(["a ring"])
