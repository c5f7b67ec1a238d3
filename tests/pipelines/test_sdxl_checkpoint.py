"""SDXL from one whole checkpoint: its UNet, text encoders and autoencoder, and its settings of noise."""

import logging
from pathlib import Path

import pytest
import torch
from family_sample import CPU, PROMPTS
from safetensors.torch import load_file, save_file
from sdxl_checkpoint import UNET, sdxl_checkpoint, unet_layout
from torch import Tensor, nn

from diffsynth_lite.core.weights import FrozenLinear, Int8, Quantization
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, sdxl
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, quantizable_encoder_layers
from diffsynth_lite.pipelines.sdxl import SDXL

KEY = "model.transformer_file"
PARTS = ("unet", "text_encoder", "text_encoder_2", "vae")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a pipeline, and one of another with a checkpoint of it."""
    folder = tmp_path_factory.mktemp("sdxl")
    pipeline = sdxl.tiny()
    pipeline.save_pretrained(folder / "base")
    generator = torch.Generator().manual_seed(1)
    for part in PARTS:
        for tensor in getattr(pipeline, part).parameters():
            tensor.data += 0.01 * torch.randn(tensor.shape, generator=generator)
    pipeline.save_pretrained(folder / "finetune")
    write(sdxl_checkpoint(pipeline), folder / "checkpoint.safetensors")
    write(
        {f"{UNET}{name}": it for name, it in unet_layout(pipeline.unet).items()}, folder / "unet.safetensors"
    )
    return {name: folder / name for name in ("base", "finetune")} | {
        name: folder / f"{name}.safetensors" for name in ("checkpoint", "unet")
    }


def write(tensors: dict[str, Tensor], file: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def bound(folder: Path, file: Path | None = None, trained: tuple[str, ...] = ("unet",)) -> SDXL:
    family = SDXL(PipelineFolder(path=folder), trained=trained)
    family.take_files({} if file is None else {"unet": ComponentFile(path=file, key=KEY)})
    return family


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    left, right = (dict(model.named_parameters()) | dict(model.named_buffers()) for model in (ours, theirs))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def test_models_and_prompts_are_those_of_the_checkpoint(places: dict[str, Path]) -> None:
    trained = ("unet", "text_encoder", "text_encoder_2")
    both = bound(places["base"], places["checkpoint"], trained), bound(places["finetune"], trained=trained)
    assert_same(*(family.load_transformer(torch.float32) for family in both))
    assert_same(*(family.load_component("vae", torch.float16) for family in both))
    from_file, from_folder = (
        encode([Prompt(text=PROMPTS[0])])[0]
        for encode in (SDXL(family.folder).load_prompt_encoder(torch.bfloat16, CPU) for family in both)
    )
    assert all(torch.equal(tensor, from_folder[name]) for name, tensor in from_file.items())


def test_its_autoencoder_works_in_tiles_where_that_is_asked_for(places: dict[str, Path]) -> None:
    family = bound(places["base"], places["checkpoint"])
    assert not family.load_component("vae", torch.float32).use_tiling
    family.tile_vae()
    assert family.load_component("vae", torch.float32).use_tiling


def test_its_text_encoders_can_be_quantised(places: dict[str, Path]) -> None:
    loaded = []
    for family in (bound(places["base"], places["checkpoint"]), bound(places["finetune"])):
        layers = tuple(quantizable_encoder_layers(family.empty_component("text_encoder")))
        chosen = Quantization(format=Int8(), layers=layers, device=CPU)
        family.text_encoder_memory = TextEncoderMemory(quantizations={"text_encoder": chosen})
        loaded.append(family.load_component("text_encoder", torch.bfloat16))
    assert any(isinstance(module, FrozenLinear) for module in loaded[0].modules())
    assert_same(*loaded)


def test_what_is_encoded_is_known_by_the_file(places: dict[str, Path], tmp_path: Path) -> None:
    family, plain = bound(places["base"], places["checkpoint"]), bound(places["base"])
    changed = load_file(places["checkpoint"])
    changed["first_stage_model.quant_conv.bias"] += 1
    other = bound(places["base"], write(changed, tmp_path / "other.safetensors"))
    ids = [
        (one.prompt_encoder_id(torch.float32), one.media_encoder_id(torch.float32), one.fingerprint())
        for one in (family, plain, other)
    ]
    for of_each in zip(*ids, strict=True):
        assert len(set(of_each)) == 3


def test_a_file_with_only_a_unet_leaves_the_rest_to_the_folder(
    places: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        family = bound(places["base"], places["unet"])
        family.check_folder()
    assert "unet.safetensors has no text_encoder, text_encoder_2, vae: those of model.path are" in caplog.text
    assert f"unet of {places['unet']}: float32." in caplog.text
    assert_same(
        family.load_transformer(torch.float32), bound(places["finetune"]).load_transformer(torch.float32)
    )
    for part in PARTS[1:]:
        theirs = bound(places["base"]).load_component(part, torch.float32)
        assert_same(family.load_component(part, torch.float32), theirs)


def test_the_file_decides_what_the_unet_predicts(places: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(places["unet"])
    assert bound(places["base"], places["unet"]).prediction_type == "epsilon"
    file = write(tensors | {"v_pred": torch.ones(0)}, tmp_path / "v.safetensors")
    family = bound(places["base"], file)
    assert family.prediction_type == "v_prediction"
    assert not family.load_scheduler().config.rescale_betas_zero_snr
    write(tensors | {"v_pred": torch.ones(0), "ztsnr": torch.ones(0)}, file)
    family = bound(places["base"], file)
    config = family.load_scheduler().config
    assert (config.rescale_betas_zero_snr, config.timestep_spacing) == (True, "trailing")
    assert family.distilled is None
    family.scheduler_config["_class_name"] = "PNDMScheduler"
    with pytest.raises(UserError, match=f"{KEY}: .* needs a sampler that knows rescale_betas_zero_snr"):
        family.check_scheduler(family.load_scheduler())


def test_a_checkpoint_of_edm_is_refused(places: dict[str, Path], tmp_path: Path) -> None:
    file = write(load_file(places["unet"]) | {"edm_mean": torch.ones(4)}, tmp_path / "edm.safetensors")
    with pytest.raises(UserError, match=rf"{KEY}: .* noise levels of EDM \(edm_mean\)"):
        bound(places["base"], file)


def test_a_checkpoint_of_another_model_is_refused(places: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(places["checkpoint"])
    label = f"{UNET}label_emb.0.0.weight"
    of_sd = {
        name: it for name, it in tensors.items() if "label_emb" not in name and "conditioner" not in name
    }
    sd = of_sd | {f"{UNET}output_blocks.11.0.skip_connection.weight": torch.ones(1)}
    wider = tensors | {label: tensors[label].repeat(1, 2)}
    for changed, kind in ((sd, "what diffusers calls v1"), (wider, "label_emb|add_embedding")):
        with pytest.raises(UserError, match=rf"{KEY}: .* does not fit model.path: .*{kind}"):
            bound(places["base"], write(changed, tmp_path / "other.safetensors")).check_folder()


def test_a_checkpoint_in_plain_8_bits_is_cast(places: dict[str, Path], tmp_path: Path) -> None:
    narrow = {
        name: tensor.to(torch.float8_e4m3fn) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(places["checkpoint"]).items()
    }
    wide = {name: it.float() if it.is_floating_point() else it for name, it in narrow.items()}
    both = [
        bound(places["base"], write(tensors, tmp_path / f"{name}.safetensors"))
        for name, tensors in (("narrow", narrow), ("wide", wide))
    ]
    for part in ("text_encoder_2", "vae"):
        assert_same(*(family.load_component(part, torch.bfloat16) for family in both))
