"""SDXL's UNet, prompts, latents, sampling and checkpoints against diffusers' own, and its folders."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers_pipelines import bytes_of, generated_by
from family_sample import (
    CPU,
    PROMPTS,
    assert_equal_under_all_flags,
    build_media,
)
from release_layouts import request_of_sdxl, saved_sdxl
from safetensors.torch import load_file, save_file
from sdxl_checkpoint import UNET, sdxl_checkpoint, unet_layout
from torch import Tensor, nn

from diffsynth_lite.core.gradient import blocks_of, intercept_blocks
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Crop, Prompt
from diffsynth_lite.pipelines import PipelineFolder, sdxl
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, quantizable_encoder_layers
from diffsynth_lite.pipelines.sdxl import SDXL, model_fn_sdxl, tiny
from diffsynth_lite.pipelines.sdxl.family import unet_block_lists

FAMILY = "sdxl"


# The layouts of SDXL and of models cut down from it, at a width for tests.
LAYOUTS: dict[str, dict[str, Any]] = {
    "two levels": {},
    "as released": {
        "block_out_channels": (8, 8, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
        "attention_head_dim": (1, 1, 2),
        "layers_per_block": 2,
    },
    "no middle": {"mid_block_type": None},
    "levels of unequal depth": {"layers_per_block": (2, 1), "transformer_layers_per_block": (1, 1)},
}


def small_unet(layout: str = "two levels") -> UNet2DConditionModel:
    # Without the names that ``from_config`` would take for those of settings left at their defaults.
    settings = {name: value for name, value in tiny().unet.config.items() if not name.startswith("_")}
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**settings | LAYOUTS[layout])
    assert (unet.mid_block is None) == (layout == "no middle")
    return unet


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_function_equals_the_unets_own_forward(layout: str) -> None:
    unet, generator = small_unet(layout), torch.Generator().manual_seed(0)
    noisy, embeds, pooled = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 8, 12), (77, 64), (32,))
    )
    timestep = torch.tensor([3, 998])
    time_ids = torch.tensor([[96, 64, 8, 0, 64, 96], [64, 96, 0, 16, 64, 96]])
    reference = unet(
        noisy, timestep, embeds, added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids}
    ).sample
    inputs = noisy, timestep, embeds, pooled, time_ids
    assert None not in assert_equal_under_all_flags(unet, reference, model_fn_sdxl, *inputs).values()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_declared_blocks_are_those_that_the_hook_runs_in_their_order(layout: str) -> None:
    unet = small_unet(layout)
    run: list[torch.nn.Module] = []

    def record(_index: int, block: torch.nn.Module, *args: Any) -> Any:
        run.append(block)
        return block(*args)

    with intercept_blocks(unet, record):
        unet(
            *(torch.zeros(1, 4, 8, 8), 0, torch.zeros(1, 77, 64)),
            added_cond_kwargs={"text_embeds": torch.zeros(1, 32), "time_ids": torch.zeros(1, 6)},
        )
    declared = blocks_of(unet, tuple(unet_block_lists(unet.config)))
    assert len(run) == len(declared)
    assert all(block is other for block, other in zip(run, declared, strict=True))
    kinds = {"ResnetBlock2D", "BasicTransformerBlock"}
    blocks = [block for block in unet.modules() if type(block).__name__ in kinds]
    assert len(blocks) - len(run) == (unet.mid_block is not None)


def test_sdxl_as_released_has_86_such_blocks() -> None:
    released = {
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "layers_per_block": 2,
    }
    depth = {"down_blocks.1": 2, "down_blocks.2": 10, "mid_block": 10, "up_blocks.0": 10, "up_blocks.1": 2}
    numbers = [
        depth[name.split(".attentions")[0]] if name.endswith("transformer_blocks") else 1
        for name in unet_block_lists(released)
    ]
    assert sum(numbers) == 86


def test_the_unet_gets_the_size_of_the_file_and_where_the_crop_begins(family: SDXL) -> None:
    plain = build_media(family)[0]
    cropped = replace(plain, crop=Crop(original_width=900, original_height=500, left=5, top=3))
    encode = family.load_media_encoder(torch.float32, CPU)
    given = [tensors["time_ids"].tolist() for tensors in encode([plain, cropped])]
    assert plain.frames[0].size == (64, 32)
    assert given == [[32, 64, 0, 0, 32, 64], [500, 900, 3, 5, 32, 64]]
    assert family.media_encoder_id(torch.float32).startswith("sdxl/latents/2 ")


def test_an_autoencoder_that_fp16_is_too_narrow_for_is_refused(family: SDXL, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vae_dtype: float16 .* use float32"):
        family.check_vae_dtype(torch.float16)
    family.check_vae_dtype(torch.bfloat16)
    vae = tiny().vae
    vae.register_to_config(force_upcast=False)  # as in the VAE that was mended for it
    saved_sdxl(tiny(), tmp_path, vae=vae).check_vae_dtype(torch.float16)


@pytest.mark.parametrize(
    "trained", [["text_encoder"], ["unet", "text_encoder"], ["text_encoder", "text_encoder_2"]]
)
def test_the_unet_is_trained_by_itself_or_with_both_text_encoders(family: SDXL, trained: list[str]) -> None:
    choices = r"use \[unet\], or \[unet, text_encoder, text_encoder_2\]"
    with pytest.raises(UserError, match=rf"lora\.components: .*{', '.join(trained)}.*{choices}"):
        SDXL(family.folder, trained=trained)


BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


ZERO_SNR = {**BETAS, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}


SCHEDULERS = {
    "epsilon": lambda: EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
    "v": lambda: EulerDiscreteScheduler(**BETAS, prediction_type="v_prediction"),
    "v without a signal at the end": lambda: EulerDiscreteScheduler(**ZERO_SNR, timestep_spacing="trailing"),
    "epsilon, another sampler": lambda: DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=True),
    "v without any signal at the end": lambda: DDIMScheduler(
        **ZERO_SNR, clip_sample=False, set_alpha_to_one=True, timestep_spacing="trailing"
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_sampler_comes_back_to_the_clean_latents_along_the_target(name: str, tmp_path: Path) -> None:
    family = saved_sdxl(tiny(), tmp_path, scheduler=SCHEDULERS[name]())
    family.check_folder()
    path, scheduler = family.noise_path, family.load_scheduler()
    clean, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(10)
    for timestep in scheduler.timesteps:
        sigma = ((timestep + 0.5) / 1000).float().expand(3)
        assert path.timestep(sigma).tolist() == [int(timestep)] * 3
        noisy = scheduler.add_noise(clean, noise, timestep.expand(3))
        shown = scheduler.scale_model_input(noisy, timestep)
        torch.testing.assert_close(shown, path.add_noise(clean, noise, sigma), rtol=0, atol=1e-5)
        stepped = scheduler.step(path.target(clean, noise, sigma), timestep, noisy)
        # Euler's first noise is 4096 times as large as the latents where no signal is left.
        torch.testing.assert_close(stepped.pred_original_sample, clean, rtol=0, atol=2e-3)
    torch.testing.assert_close(stepped.prev_sample, clean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("zeros", "theirs"), [(True, None), (False, " ")])
def test_a_preview_with_an_empty_negative_prompt_is_what_the_pipeline_generates(
    zeros: bool, theirs: str | None, tmp_path: Path
) -> None:
    family = saved_sdxl(tiny(), tmp_path, force_zeros_for_empty_prompt=zeros)
    pipeline = StableDiffusionXLPipeline.from_pretrained(tmp_path, add_watermarker=False)
    request = request_of_sdxl(family, " ", guidance_scale=5.0)
    (generated,) = family.sample(family.load_transformer(torch.float32), torch.float32, [request])
    expected = generated_by(pipeline, request, prompt=PROMPTS[0], negative_prompt=theirs)
    assert bytes_of(generated) == expected


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
    sd = {name: it for name, it in tensors.items() if "label_emb" not in name and "conditioner" not in name}
    wider = tensors | {label: tensors[label].repeat(1, 2)}
    for changed, kind in ((sd, "a UNet of Stable Diffusion 1 or 2"), (wider, "label_emb|add_embedding")):
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
