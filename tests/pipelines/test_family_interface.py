"""What every family has to do; a new file under pipelines/ is tested here from the moment it exists."""

import functools
import inspect
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, MiniMaxH3Scheduler
from family_sample import (
    CPU,
    ELSEWHERE,
    SIGMA,
    Sample,
    adapted_transformer,
    as_sampled,
    mandelbrot,
    noise_levels,
    ones_like,
    transformer_calls,
    with_first,
)
from safetensors.torch import load_file, save_file

from diffsynth_lite.core.noise.paths import DiffusionPath
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import EditInputs, ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.model_function import INPUT


def test_default_targets_match_the_structure_without_weights(sample: Sample) -> None:
    family = sample.family
    empty = family.empty_transformer()
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    found = [
        find_target_layers(model, family.default_target_modules, unused_modules=family.unused_modules(model))
        for model in (empty, sample.model)
    ]
    assert found[0] == found[1]
    assert found[0]


def test_the_base_is_loaded_frozen_and_in_the_dtype_asked_for(sample: Sample) -> None:
    transformer = sample.family.load_transformer(torch.bfloat16)
    # diffusers names modules that stay in fp32, because they lose too much in bf16.
    in_fp32 = transformer._keep_in_fp32_modules or ()
    for name, parameter in transformer.named_parameters():
        kept = any(part in in_fp32 for part in name.split("."))
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert not any(parameter.requires_grad for parameter in transformer.parameters())


LONGEST_PROMPTS = {"hunyuan_video_i2v": 256 - 4 + 576 // 4}
"""Rows of prompts as long as may be, with those of an image."""


@pytest.mark.families(lambda name, _: name not in ELSEWHERE)
def test_an_example_of_the_conditioning_is_what_the_encoders_give_of_a_prompt_as_long_as_may_be(
    sample: Sample,
) -> None:
    example = sample.family.example_conditioning(sample.latents.shape[1:])
    assert example is not None
    given = {name: value for name, value in sample.conditioning[0].items() if not name.startswith(INPUT)}
    assert example.keys() == given.keys()
    for name, value in given.items():
        # The first axis of a prompt is that of its tokens.
        # Some have rows of another text encoder than those that are counted.
        shape = value.shape
        if name == "prompt_embeds":
            longest = LONGEST_PROMPTS.get(sample.name, sample.family.max_prompt_tokens)
            shape = (max(longest, len(value)), *shape[1:])
        assert example[name].shape == shape, name
        assert example[name].dtype == value.dtype or value.is_floating_point(), name


def test_numbers_that_are_not_finite_are_no_preview_and_what_decodes_one_is_known(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, loaded = sample.family, []
    load = family.load_preview_vae
    monkeypatch.setattr(family, "load_preview_vae", lambda *given: loaded.append(load(*given)) or loaded[-1])
    transformer = adapted_transformer(sample.family).eval()
    with torch.no_grad():
        for weight in transformer.parameters():
            weight.mul_(torch.inf)
    short = sample.request(num_inference_steps=family.min_inference_steps, guidance_scale=1.0, seed=5)
    with pytest.raises(FloatingPointError, match="NaN or infinity"):  # diffusers makes it black
        family.sample(transformer, torch.float32, [short])
    assert len(loaded) == 1  # what decodes in tiles on a full device


def test_the_shift_is_positive_and_grows_with_the_image_where_it_depends_on_it(sample: Sample) -> None:
    family = sample.family
    small = sample.latents.shape[1:]
    large = torch.Size((*small[:-2], small[-2] * 8, small[-1] * 8))
    assert 0 < family.family_shift(small) <= family.family_shift(large)
    if isinstance(family.noise_path, DiffusionPath):
        assert family.family_shift(large) == 1
        with pytest.raises(UserError, match=r"objective\.shift: resolution is not defined"):
            family.resolution_shift(small)
    else:
        assert family.resolution_shift(small) < family.resolution_shift(large)


@pytest.mark.further_layouts
def test_a_noise_level_is_given_to_the_model_as_by_the_sampler(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, transformer = sample.family, sample.model
    scheduler = family.load_scheduler()
    monkeypatch.setattr(family, "load_scheduler", lambda: scheduler)
    request = sample.request(num_inference_steps=4, guidance_scale=1.0, seed=0)
    sampled = transformer_calls(transformer, lambda: family.sample(transformer, torch.float32, [request]))
    sigmas = noise_levels(sample, scheduler)
    assert len(sigmas) == len(sampled) >= 3  # some samplers take one more, or one less

    def given_at(sigma: torch.Tensor) -> dict[str, Any]:
        batch = sample.latents[:1], sigma.float()[None], sample.conditioning[:1]
        return transformer_calls(transformer, lambda: family.predict(transformer, *batch))[0]

    first, last = (given_at(torch.tensor(sigma))["timestep"].item() for sigma in (0.0, 1.0))
    for call, sigma in zip(sampled, sigmas, strict=True):
        ours = given_at(sigma)
        # Some schedulers round to whole timesteps, of 1000.
        levels = call["timestep"]
        if sample.name == "minimax_h3":
            levels = levels[:1]  # the other one is of audio
        difference = (levels - ours["timestep"]).abs().max()  # there may be one for each token
        assert difference <= abs(last - first) / 1000
        # Row by row: some models take a list of samples in place of a batch.
        for theirs, row in zip(call["hidden_states"], ours["hidden_states"], strict=True):
            assert theirs.shape == row.shape
        for theirs, row in zip(call["encoder_hidden_states"], ours["encoder_hidden_states"], strict=True):
            assert torch.equal(theirs[: len(row)], row)
            assert not theirs[len(row) :].any()  # padding that previews have and batches need not


TAKE_GUIDANCE = ("flux", "flux2", "flux_fill", "flux_kontext", "hunyuan_video", "hunyuan_video_i2v")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.of_the_model
@pytest.mark.families(lambda name, _: name in TAKE_GUIDANCE)
def test_in_training_the_model_gets_the_scale_that_is_set_as_from_the_pipeline(
    sample: Sample, dtype: torch.dtype
) -> None:
    family = type(sample.family)(sample.family.folder)
    model = family.load_transformer(dtype)
    batch = sample.latents[:1], SIGMA[:1], sample.conditioning[:1]
    for scale in (family.training_guidance, 6.3):
        family.training_guidance = scale
        (trained,) = transformer_calls(model, lambda: family.predict(model, *batch))
        request = sample.request(num_inference_steps=1, guidance_scale=scale, seed=0)
        sampled = transformer_calls(model, partial(family.sample, model, torch.float32, [request]))[0]
        assert torch.equal(trained["guidance"], sampled["guidance"])
    assert family.takes_guidance


def test_the_velocity_is_what_the_pipeline_hands_to_its_sampler(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = sample.family
    scheduler_class = type(family.load_scheduler())
    handed_over: list[torch.Tensor] = []
    step = scheduler_class.step

    @functools.wraps(step)
    def watched(scheduler: Any, output: torch.Tensor, *args: Any, **settings: Any) -> Any:
        # One scheduler, and another with a noise level for each token, go the other way along what they get.
        is_reversed = settings.get("per_token_timesteps") is not None or isinstance(
            scheduler, MiniMaxH3Scheduler
        )
        handed_over.append(-output if is_reversed else output)
        return step(scheduler, output, *args, **settings)

    # Of the class: some pipelines copy their sampler, for what else than the clip they generate.
    monkeypatch.setattr(scheduler_class, "step", watched)
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    hook = sample.model.register_forward_hook(
        lambda _module, _args, output: with_first(output, ones_like(output[0]))
    )
    family.sample(sample.model, torch.float32, [request])
    ours = family.predict(sample.model, sample.latents, SIGMA, sample.conditioning)
    hook.remove()
    # A model that returns 1 everywhere: sign and scale show, the layout does not matter.
    (everywhere,) = ours.unique().tolist()
    # LTX-2's pipeline goes over the clean latents, where it guides, and back.
    rounding = 1e-5 if sample.name == "ltx2" else 0
    assert (handed_over[0] - everywhere).abs().max() <= rounding
    assert as_sampled(ours[:1], handed_over[0]).numel() == handed_over[0].numel()


def test_one_step_of_the_sampler_along_the_target_returns_the_clean_latents(sample: Sample) -> None:
    scheduler = sample.family.load_scheduler()
    # It counts noise levels in place of steps, and goes the other way.
    is_of_h3 = isinstance(scheduler, MiniMaxH3Scheduler)
    shift = {"mu": 0.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(2 + is_of_h3, **shift)
    timestep = scheduler.timesteps[1]  # the last step ends without noise
    sigma = noise_levels(sample, scheduler)[1].float().expand(len(sample.latents))
    noise = torch.randn(sample.latents.shape, generator=torch.Generator().manual_seed(0))
    path = sample.family.noise_path
    shown = noisy = path.add_noise(sample.latents, noise, sigma)
    if isinstance(path, DiffusionPath):  # some samplers keep another scale than the one they show the model
        noisy = scheduler.add_noise(sample.latents, noise, timestep.expand(len(sample.latents)))
        shown = scheduler.scale_model_input(noisy, timestep)
    torch.testing.assert_close(shown, path.add_noise(sample.latents, noise, sigma), rtol=0, atol=1e-5)
    target = path.target(sample.latents, noise, sigma)
    given = {"model_output": -target if is_of_h3 else target, "timestep": timestep, "sample": noisy}
    # Some samplers also want what they returned in the step before, of which there is none.
    parameters = inspect.signature(scheduler.step).parameters.values()
    wanted = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    end, *_ = scheduler.step(**dict.fromkeys(wanted) | given, return_dict=False)
    clean = sample.latents
    if getattr(scheduler, "final_alpha_cumprod", 1) != 1:  # its last step ends with the noise of timestep 0
        clean = path.add_noise(clean, noise, torch.zeros_like(sigma))
    torch.testing.assert_close(end, clean, rtol=0, atol=1e-5)


def test_sizes_that_do_not_fit_name_the_nearest_that_would(sample: Sample) -> None:
    divisor = sample.family.size_divisor
    sample.family.check_size(4 * divisor, 2 * divisor, keys="data.width, data.height")
    with pytest.raises(ValueError, match=f"nearest size is {4 * divisor}x{2 * divisor}"):
        sample.family.check_size(4 * divisor + 1, 2 * divisor, keys="data.width, data.height")


def test_the_tiny_pipeline_passes_the_check_of_its_folder(sample: Sample) -> None:
    sample.family.check_folder()
    assert sample.family.folder.pipeline_class_name() in sample.family.pipeline_classes


def test_frame_counts_that_do_not_fit_name_the_nearest_that_would(sample: Sample) -> None:
    family = sample.family
    assert (family.frame_step is None) == (family.default_fps is None)
    family.check_frames(family.default_num_frames, key="data.frame_counts")
    for wrong in (0, 2 if family.frame_step is None else family.frame_step):
        with pytest.raises(ValueError, match=f"data.frame_counts: {wrong} frames; this family"):
            family.check_frames(wrong, key="data.frame_counts")


def test_the_shape_of_latents_is_known_before_anything_is_encoded(sample: Sample) -> None:
    divisor, (_, *shape) = sample.family.size_divisor, sample.latents.shape
    num_frames = len(sample.media[0].frames) + len(sample.media[0].layers)
    assert sample.family.latents_shape(4 * divisor, 2 * divisor, num_frames) == tuple(shape)


TOO_NARROW = {"flux_kontext": (8, 900), "qwen_image_edit": (8000, 2)}
"""Images to edit of which no row or no column would be left."""


@pytest.mark.further_layouts
@pytest.mark.families(lambda name, family: issubclass(family, EditInputs) and name != "hunyuan_video_i2v")
def test_the_size_of_an_image_to_edit_is_known_before_it_is_encoded(sample: Sample) -> None:
    family, frames = sample.family, sample.media[0].frames
    encode = family.load_media_encoder(torch.float32, CPU)
    images = [mandelbrot(*size, 20) for size in ((100, 68), (64, 100), (64, 64), (200, 31 * 3), (512, 64))]
    items = encode([Media(frames=frames, inputs=(image,)) for image in images])
    for image, encoded in zip(images, items, strict=True):
        (latents,) = (tensor for name, tensor in encoded.items() if name.startswith(INPUT))
        assert latents.shape == family.latents_shape(*family.input_size(*image.size), 1)
    if size := TOO_NARROW.get(sample.name):
        with pytest.raises(UserError, match=f"{size[0]}x{size[1]} pixels are too narrow for an input image"):
            family.input_size(*size)
    if family.max_inputs == 1:
        for inputs in ((), tuple(images[:2])):
            with pytest.raises(UserError, match=f"{len(inputs)} input images; .* takes exactly one"):
                encode([Media(frames=frames, inputs=inputs)])


def test_the_length_of_a_prompt_is_that_of_its_tokens(sample: Sample) -> None:
    short, long = sample.family.prompt_lengths(["a circle", "a circle a circle a circle"])
    assert 0 < short < long < sample.family.max_prompt_tokens


def loads(family: ModelFamily) -> dict[str, Callable[[], object]]:
    """What loads each kind of weights, by component."""
    return {
        family.trained[0]: lambda: family.load_transformer(torch.float32),
        "vae": lambda: family.load_media_encoder(torch.float32, CPU),
        "text_encoder": lambda: family.load_prompt_encoder(torch.float32, CPU),
    }


def test_damaged_weights_are_named_and_are_no_bug_of_ours(sample: Sample, tmp_path: Path) -> None:
    family = copied(sample, tmp_path)
    for component, load in loads(family).items():
        (weights,) = (family.folder.path / component).glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(UserError, match=f"{component} cannot be read"):
            load()


def test_weights_that_the_files_lack_or_have_in_another_shape_are_not_made_up(
    sample: Sample, tmp_path: Path
) -> None:
    family = copied(sample, tmp_path)
    for component in (family.trained[0], "text_encoder"):
        (file,) = (family.folder.path / component).glob("*.safetensors")
        tensors = load_file(file)
        missing, other = [name for name in tensors if ".0." in name and name.endswith(".weight")][:2]
        del tensors[missing]
        tensors[other] = torch.cat([tensors[other], tensors[other]])
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(UserError, match=rf"{component} do not fit their config.json: 2 of a \w+ are mis"):
            loads(family)[component]()


def copied(sample: Sample, folder: Path, variant: str | None = None) -> ModelFamily:
    """The family on a copy of its folder, for a test that changes it."""
    copy = Path(shutil.copytree(sample.family.folder.path, folder / "copy"))
    return type(sample.family)(PipelineFolder(path=copy, variant=variant))


def test_a_component_without_files_is_named(sample: Sample, tmp_path: Path) -> None:
    family = copied(sample, tmp_path)
    for component in (*family.components, *family.components_without_weights):
        here, away = family.folder.path / component, tmp_path / "away"
        here.rename(away)
        here.mkdir()
        with pytest.raises(UserError, match=component):
            type(family)(PipelineFolder(path=family.folder.path)).check_folder()
        here.rmdir()
        away.rename(here)


def test_a_component_of_another_class_is_named_with_the_class_wanted(sample: Sample, tmp_path: Path) -> None:
    family = copied(sample, tmp_path)
    for component in family.components:
        file = family.folder.path / component / "config.json"
        written = file.read_text()
        config = json.loads(written)
        (key,) = {"_class_name", "model_type"} & config.keys()
        file.write_text(json.dumps({key: "Other"}))
        message = rf"{component}.config\.json is that of a Other, .* as a \w+ \({key}: {config[key]}\)"
        with pytest.raises(UserError, match=message):
            family.check_folder(with_weights=False)
        file.write_text(written)
    family.check_folder()


@pytest.mark.families(lambda name, _: name != "flux3")  # its sampler is a part of its pipeline
def test_a_sampler_of_another_kind_of_noise_is_refused(sample: Sample, tmp_path: Path) -> None:
    family = copied(sample, tmp_path)
    trains_diffusion = isinstance(family.noise_path, DiffusionPath)
    other = FlowMatchEulerDiscreteScheduler() if trains_diffusion else DDPMScheduler()
    other.save_pretrained(family.folder.path / "scheduler")
    changed = type(family)(family.folder)
    with pytest.raises(UserError, match=rf"scheduler: {type(other).__name__}.* is not a sampler of"):
        changed.check_folder()


def test_weights_of_a_variant_are_loaded_where_it_is_named_and_refused_elsewhere(
    sample: Sample, tmp_path: Path
) -> None:
    family = copied(sample, tmp_path, variant="fp16")
    folder = family.folder.path
    for file in folder.glob("*/*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))
    family.check_folder()
    for component in family.components:
        family.load_component(component, torch.float32)
    with pytest.raises(UserError, match=r"weights without a variant .* set model\.variant: fp16$"):
        type(family)(PipelineFolder(path=folder)).check_folder()
