"""FLUX.3: its windows of prompts, its references, and the distilled model that only generates."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux3DistilledModularPipeline, Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import Flux3PrepareImageCondLatentsStep
from diffusers_pipelines import bytes_of
from family_sample import CPU, PROMPTS, Sample, adapted_transformer, mandelbrot, transformer_calls
from held_step import assert_same_cost, step_on_cpu
from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import BlockPolicy
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import PipelineFolder, flux3
from diffsynth_lite.pipelines.base.model_function import INPUT
from diffsynth_lite.pipelines.flux3 import Flux3
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.modular import handled_as_others
from diffsynth_lite.training.data_settings import plan_rules
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

FAMILY = "flux3"


def encoded(family: Any, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    frame = mandelbrot(64, 32, 10)
    (item,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(frame,), inputs=tuple(images))])
    return {name: tensor for name, tensor in item.items() if name.startswith(INPUT)}


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ((64, 64), (64, 64)),
        ((65, 50), (64, 48)),  # rounded up, so that nothing is cut; and down
        ((20, 300), (16, 288)),  # a side has 64 pixels at least, where it is padded
        ((2500, 1900), None),
        ((5000, 400), None),
    ],
)
def test_a_single_reference_is_padded_and_several_are_cropped_to_the_grid(
    sample: Sample, one: tuple[int, int], several: tuple[int, int] | None
) -> None:
    family = sample.family
    assert isinstance(family, Flux3)
    shown = flux3.Flux3ImageProcessor().preprocess(Image.new("RGB", one))[0]
    assert family.input_size(*one) == (shown.shape[-1], shown.shape[-2])
    if several is None:
        return
    assert family.input_size(*one, 2) == several
    images = [mandelbrot(*one, 20), mandelbrot(48, 64, 30)]
    shapes = {name: tuple(latents.shape) for name, latents in encoded(family, images).items()}
    assert shapes == {
        f"{INPUT}0": family.latents_shape(*several, 1),
        f"{INPUT}1": family.latents_shape(48, 64, 1),
    }


def test_one_of_several_references_may_be_too_narrow(sample: Sample) -> None:
    assert isinstance(sample.family, Flux3)
    assert sample.family.input_size(200, 8) == (208, 64)
    with pytest.raises(UserError, match="200x8 pixels are too narrow for one of several input images"):
        sample.family.input_size(200, 8, 2)


def test_several_references_are_the_tokens_and_places_that_the_pipeline_makes_of_them(sample: Sample) -> None:
    family, model = sample.family, sample.model
    images = [mandelbrot(70, 50, 20), mandelbrot(48, 64, 30)]
    request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
    request = type(request)(**vars(request) | {"inputs": tuple(images)})
    conditioning = [sample.first | encoded(family, images)]
    batch = sample.latents[:1], torch.ones(1), conditioning
    ours = transformer_calls(model, lambda: family.predict(model, *batch))[0]
    theirs = transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))[0]
    for name in ("image_cond_hidden_states", "image_cond_ids"):
        torch.testing.assert_close(ours[name], theirs[name], msg=name)
    assert ours["image_cond_ids"][:, 3].unique().tolist() == [-2, -1]
    step = Flux3PrepareImageCondLatentsStep()
    assert step.image_rope_scale == ours["image_cond_ids"][1, 2].item() == 0.5


def test_the_blocks_of_a_reference_are_counted_in_the_order_in_which_they_are_called(sample: Sample) -> None:
    family, model = sample.family, adapted_transformer(sample.family)
    conditioning = sample.first | encoded(family, [mandelbrot(48, 64, 30)])
    inputs = {"latents_shape": sample.latents.shape[1:], "conditioning": conditioning}
    policy = BlockPolicy(select="every_n", n=2)
    settings = StepSettings(mixed_precision="no", policy=policy, dtype=torch.float32, device_type="cpu")
    plain = family.empty_transformer()
    layers = find_target_layers(
        plain, family.default_target_modules, unused_modules=family.unused_modules(plain)
    )
    counted = MemoryCounter(family, layers, rank=4, **inputs).count(settings)
    assert_same_cost(counted.step, step_on_cpu(family, model, settings, **inputs))


def test_items_of_two_windows_count_as_they_do_one_by_one(sample: Sample) -> None:
    family, model = sample.family, sample.model
    encode = family.load_prompt_encoder(torch.float32, CPU)
    conditioning = encode([Prompt(text="a ring"), Prompt(text="a ring " * 25), Prompt(text="a circle")])
    assert [len(one["prompt_embeds"]) for one in conditioning] == [80, 160, 80]
    sigma = torch.tensor([0.2, 0.5, 0.9])
    with torch.no_grad():
        together = family.predict(model, sample.latents, sigma, conditioning)
        for place in range(3):
            one = slice(place, place + 1)
            alone = family.predict(model, sample.latents[one], sigma[one], conditioning[one])
            torch.testing.assert_close(together[one], alone)


def test_prompts_are_counted_with_the_chat_around_them_by_which_they_get_their_window(sample: Sample) -> None:
    texts = ["a ring" + " a" * number for number in range(20, 80)]
    encoded = sample.family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])
    lengths = sample.family.prompt_lengths(texts)
    assert {80, 81} <= set(lengths)
    assert [len(one["prompt_embeds"]) for one in encoded] == [
        80 if length <= 80 else 160 for length in lengths
    ]


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a distilled model: of other weights, and with a level that each step ends at."""
    base, folder = flux3.tiny(), tmp_path_factory.mktemp("distilled")
    with seeded(1):
        transformer = Flux3Transformer2DModel.from_config(base.transformer.config, flow_map=True)
    pipeline = handled_as_others(Flux3DistilledModularPipeline)()
    parts = {name: getattr(base, name) for name in ("text_encoder", "tokenizer", "vae")}
    pipeline.update_components(transformer=transformer.eval(), **parts)
    pipeline.save_pretrained(folder)
    return folder


def test_a_distilled_model_generates_as_its_own_pipeline(sample: Sample, distilled: Path) -> None:
    family = Flux3(PipelineFolder(path=distilled))
    family.check_folder()
    assert not family.has_guidance
    request = sample.request(num_inference_steps=3, guidance_scale=4.0, seed=3)
    model = family.load_transformer(torch.float32)
    with torch.no_grad():
        [frames] = family.sample(model, torch.float32, [request])
    ends = [
        call["target_timestep"].item()
        for call in transformer_calls(model, lambda: family.sample(model, torch.float32, [request]))
    ]
    assert ends[-1] == 0
    assert math.isclose(ends[0], 6.93 * (2 / 3) / (1 + 5.93 * (2 / 3)), rel_tol=1e-5)
    theirs = Flux3DistilledModularPipeline.from_pretrained(str(distilled))
    theirs.load_components()
    theirs._blocks.sub_blocks.pop("prompt_upsampler")
    expected = theirs(prompt=PROMPTS[0], output="images", **request.call_arguments())
    assert bytes_of(frames) == bytes_of(expected)


def test_a_distilled_model_is_not_trained(distilled: Path) -> None:
    config = Config.model_validate(
        {"model": {"family": "flux3", "path": "x"}, "data": {"path": "y"}, "output": {"dir": "z"}}
    )
    with pytest.raises(UserError, match=r"is a distilled FLUX.3 \(flow_map\).* validation.model_path"):
        plan_rules(config, Flux3(PipelineFolder(path=distilled)))
