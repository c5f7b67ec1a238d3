"""What is read when text encoders are quantised: which spelling, which tensors, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from family_sample import CPU
from lazy_backend import LazyBackend
from torch import Tensor, nn

from diffsynth_lite.core.weights import Int8, Quantization, QuantizationReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_json
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, qwen_image, wan
from diffsynth_lite.pipelines.base import text_encoders, transformers_loading
from diffsynth_lite.pipelines.base.text_encoders import (
    TextEncoderMemory,
    quantizable_encoder_layers,
    transformer_layers,
)
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.pipelines.wan import Wan

LAYER = "model.language_model.layers.0.self_attn.q_proj"
STORED_AS = "model.layers.0.self_attn.q_proj"


def quantised(family: ModelFamily) -> ModelFamily:
    """The family with its text encoder's transformer layers in int8."""
    layers = quantizable_encoder_layers(family.empty_component("text_encoder"))
    chosen = Quantization(format=Int8(), layers=tuple(layers), device=CPU)
    family.text_encoder_memory = TextEncoderMemory(quantizations={"text_encoder": chosen})
    return family


@pytest.fixture
def folder(tmp_path: Path) -> PipelineFolder:
    qwen_image.tiny().save_pretrained(tmp_path)
    return PipelineFolder(path=tmp_path)


def change_weights(folder: PipelineFolder, changed: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Write the text encoder's file anew, with some tensors changed or left out; what it holds then."""
    file = folder.path / "text_encoder" / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**safetensors.torch.load_file(file), **changed}
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.torch.save_file(kept, file, {"format": "pt"})
    return kept


def load(folder: PipelineFolder) -> nn.Module:
    encoder: nn.Module = quantised(QwenImage(folder)).load_component("text_encoder", torch.float32)
    return encoder


def test_files_of_earlier_and_later_versions_of_transformers_give_the_same_model(
    folder: PipelineFolder,
) -> None:
    states = [load(folder).state_dict()]
    stored = change_weights(folder, {})
    assert f"{STORED_AS}.weight" in stored
    later = {
        name.replace("visual.", "model.visual.")
        .replace("model.layers", "model.language_model.layers")
        .replace("model.norm", "model.language_model.norm")
        .replace("model.embed", "model.language_model.embed"): value
        for name, value in stored.items()
    }
    assert f"{LAYER}.weight" in later
    change_weights(folder, {**dict.fromkeys(stored), **later})
    states.append(load(folder).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_layers_of_pictures_are_a_stack_of_their_own(folder: PipelineFolder) -> None:
    encoder = QwenImage(folder).empty_component("text_encoder")
    kinds = [{type(layer).__name__ for layer in stack} for stack in transformer_layers(encoder)]
    assert kinds == [{"Qwen2_5_VLVisionBlock"}, {"Qwen2_5_VLDecoderLayer"}]
    memory = TextEncoderMemory(num_slots=1)
    assert memory.streamed_layers([encoder]) == transformer_layers(encoder)
    assert TextEncoderMemory(num_slots=2).streamed_layers([encoder]) == []
    assert TextEncoderMemory().streamed_layers([encoder]) == []


def test_what_transformers_keeps_in_fp32_is_not_quantised(tmp_path: Path) -> None:
    wan.tiny().save_pretrained(tmp_path)
    encoder = quantised(Wan(PipelineFolder(path=tmp_path))).load_component("text_encoder", torch.bfloat16)
    assert QuantizationReport.of(encoder).num_layers == 12
    # Its input is cast to the dtype of its weight, which in a format holds no numbers to compute with.
    assert encoder.get_submodule("encoder.block.0.layer.1.DenseReluDense.wo").weight.dtype == torch.bfloat16


def test_weights_that_do_not_fit_are_refused_as_without_quantisation(folder: PipelineFolder) -> None:
    change_weights(folder, {f"{STORED_AS}.weight": torch.zeros(3, 3), f"{STORED_AS}.bias": None})
    messages = []
    for family in (QwenImage(folder), quantised(QwenImage(folder))):
        with pytest.raises(
            UserError, match="2 of a Qwen2_5_VLForConditionalGeneration are missing"
        ) as caught:
            family.load_component("text_encoder", torch.float32)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_weights_that_are_not_finite_are_refused_by_name(folder: PipelineFolder) -> None:
    change_weights(folder, {f"{STORED_AS}.weight": torch.full((16, 16), torch.nan)})
    with pytest.raises(
        UserError, match=rf"model.path: .*safetensors: .*{LAYER}\.weight holds numbers that are"
    ):
        load(folder)


def test_weights_that_are_quantised_already_are_refused(folder: PipelineFolder) -> None:
    config = folder.component_config("text_encoder") | {
        "quantization_config": {"quant_method": "bitsandbytes"}
    }
    write_json(folder.path / "text_encoder" / "config.json", config)
    with pytest.raises(UserError, match="text_encoder are quantised already"):
        load(folder)


def test_weights_that_transformers_would_compute_from_others_are_refused(
    folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = transformers_loading._StandIn.__getitem__
    # As its converters do, of which the present version has none for these models.
    monkeypatch.setattr(
        transformers_loading._StandIn, "__getitem__", lambda tensor, place: convert(tensor, place) + 0
    )
    with pytest.raises(UserError, match=r"computes .* of a Qwen2_5_VLForConditionalGeneration from other"):
        load(folder)


@pytest.mark.parametrize("settings", [{"num_slots": 1}, {}])
def test_a_family_that_loads_its_text_encoder_by_itself_is_refused(
    folder: PipelineFolder, settings: dict[str, Any]
) -> None:
    memory = TextEncoderMemory(**settings) if settings else quantised(QwenImage(folder)).text_encoder_memory
    with pytest.raises(
        UserError, match="no effect, as this family loads its text encoder in a way of its own"
    ):
        memory.watched(lambda: lambda prompts: prompts)


def test_what_was_done_is_said_once_after_the_first_prompt(
    folder: PipelineFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    family = quantised(QwenImage(folder))
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
