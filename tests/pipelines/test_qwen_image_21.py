"""Qwen-Image 2.1 with images to start from, against diffusers' own pipeline and from raw prompts."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Pipeline
from diffusers.modular_pipelines.qwenimage21 import encoders
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from diffusers_pipelines import bytes_of
from family_sample import CPU, NEGATIVE, PROMPTS, Sample, mandelbrot, transformer_calls
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import Conditioning, PipelineFolder
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.pipelines.qwen_image_21 import QwenImage21, model_fn_qwen_image_21
from diffsynth_lite.pipelines.qwen_image_edit import load_image_processor
from diffsynth_lite.testing import seeded
from diffsynth_lite.training.distilled import read_training_adapter

FAMILY = "qwen_image_21"
WIDE, TALL, SQUARE = mandelbrot(140, 52, 20), mandelbrot(40, 90, 30), mandelbrot(64, 64, 40)
Images = tuple[Image.Image, ...]


def encoded(family: Any, images: Images, *texts: str) -> list[Conditioning]:
    """The conditioning of items that start from the same images."""
    given = [Prompt(text=text, images=images) for text in texts]
    prompts = family.load_prompt_encoder(torch.float32, CPU)(given)
    (item,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=(SQUARE,), inputs=images)])
    del item["latents"]
    return [prompt | item for prompt in prompts]


@pytest.fixture(scope="module")
def model(sample: Sample) -> torch.nn.Module:
    """With other weights where those of a new model change nothing, as in its norms."""
    transformer = sample.family.load_transformer(torch.float32)
    with seeded(3):
        for parameter in transformer.parameters():
            if len(parameter.unique()) == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return transformer


@pytest.mark.parametrize("images", [(WIDE,), (TALL, WIDE), (SQUARE, TALL, SQUARE)])
def test_a_model_predicts_and_generates_as_the_pipeline_does_of_raw_prompts_and_images(
    sample: Sample, model: torch.nn.Module, images: Images
) -> None:
    family, pipeline = sample.family, sample.fresh_pipeline()
    pipeline.transformer.load_state_dict(model.state_dict())
    prompts = encoded(family, images, PROMPTS[1], NEGATIVE)
    request = sample.request(num_inference_steps=3, guidance_scale=3.0, seed=5)
    given = {"inputs": images, "conditioning": prompts[0], "negative": prompts[1]}
    [ours] = family.sample(model, torch.float32, [dataclasses.replace(request, **given)])
    arguments = {"image": list(images), "true_cfg_scale": 3.0, **request.call_arguments()}
    theirs: list[Any] = []
    outputs: list[torch.Tensor] = []
    calls = transformer_calls(
        pipeline.transformer,
        lambda: theirs.extend(pipeline(PROMPTS[1], negative_prompt=NEGATIVE, **arguments).images),
        outputs,
    )
    assert bytes_of(ours) == bytes_of(theirs)
    shape = sample.latents[:1].shape
    num_tokens = family.num_tokens(shape[1:])
    for call, output, prompt in zip(
        calls, outputs, itertools.islice(itertools.cycle(prompts), 6), strict=True
    ):
        noisy = call["hidden_states"][:, -num_tokens:].transpose(1, 2).reshape(shape)
        with torch.no_grad():
            predicted = family.predict(model, noisy, call["timestep"], [prompt])
        expected = output[:, -num_tokens:].transpose(1, 2).reshape(shape)
        assert (predicted - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_prompts_of_several_lengths_and_images_of_several_sizes_count_as_they_do_alone(
    sample: Sample, model: torch.nn.Module
) -> None:
    conditioning = encoded(sample.family, (TALL, WIDE), "a red ring", "a blue square on it", "a ring red")
    sigma, together = torch.tensor([0.2, 0.5, 0.9]), []

    def predict(*places: int) -> torch.Tensor:
        batch = sample.latents[[*places]], sigma[[*places]], [conditioning[place] for place in places]
        return sample.family.predict(model, *batch)

    calls = transformer_calls(model, lambda: together.extend(predict(0, 1, 2)))
    assert [len(call["hidden_states"]) for call in calls] == [2, 1]
    for place, row in enumerate(together):
        torch.testing.assert_close(row, predict(place)[0].detach(), rtol=0, atol=2e-6)
    # In another order they are images of other sizes, which are of another bucket.
    conditioning[2] = encoded(sample.family, (WIDE, TALL), "a red ring")[0]
    with pytest.raises(AssertionError):
        predict(0, 2)


def test_padding_of_a_prompt_with_an_image_is_not_seen(model: torch.nn.Module) -> None:
    mask, generator = torch.tensor([[1, 1, 1, 1, 0, 0, 0]]), torch.Generator().manual_seed(0)
    latents, image = (torch.randn(1, 64, 1, 4, side, generator=generator) for side in (6, 2))
    prompt = torch.randn(1, 7, 16, generator=generator)
    inputs = {"input_latents_bcfhw": [image], "input_places": [3]}

    def predict(changed: int = 7) -> torch.Tensor:
        other = prompt + (torch.arange(7) == changed)[None, :, None]
        return model_fn_qwen_image_21(model, latents, torch.ones(1), other, mask, **inputs).detach()

    assert all(torch.equal(predict(place), predict()) == (place > 3) for place in range(7))


def test_an_image_to_start_from_has_a_megapixel_and_may_be_too_narrow(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_qwenimage21, "calculate_dimensions", encoders.calculate_dimensions)
    assert sample.family.edits.input_size(300, 200) == (1248, 832)
    for size in ((20, 3600), (9000, 2)):
        with pytest.raises(UserError, match=f"{size[0]}x{size[1]} pixels are too narrow for an input image"):
            sample.family.edits.input_size(*size)


def test_a_long_caption_loses_its_end_and_no_image(sample: Sample) -> None:
    short, long = encoded(sample.family, (TALL, WIDE), "a ring", "circle " * 1100)
    assert short["input_places"].tolist() == long["input_places"].tolist() != []
    assert len(long["prompt_embeds"]) == sample.family.max_prompt_tokens


def test_settings_of_images_are_read_where_there_are_images_and_must_fit(
    sample: Sample, tmp_path: Path
) -> None:
    sample.fresh_pipeline().save_pretrained(tmp_path)
    file = tmp_path / "processor" / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["size"]["longest_edge"] = 32 * 32
    file.write_text(json.dumps(settings))
    seen = Prompt(text=PROMPTS[0], images=(SQUARE,))
    encode = QwenImage21(PipelineFolder(path=tmp_path)).load_prompt_encoder(torch.float32, CPU)
    with pytest.raises(UserError, match="has 1 tokens for its images, and the model 4"):
        encode([seen])
    file.unlink()
    encode = QwenImage21(PipelineFolder(path=tmp_path)).load_prompt_encoder(torch.float32, CPU)
    assert torch.equal(encode([Prompt(text=PROMPTS[0])])[0]["prompt_embeds"], sample.first["prompt_embeds"])
    with pytest.raises(UserError, match=r"settings of images in .*processor cannot be read"):
        encode([seen])


def test_a_plan_of_a_release_has_its_settings_of_images(tmp_path: Path) -> None:
    folder = write_release(QwenImage21.releases[0], tmp_path)
    images = load_image_processor(folder.place("processor").path)
    patches = images(images=Image.new("RGB", (1024, 1024)), return_tensors="pt")["pixel_values"]
    vision = folder.component_config("text_encoder")["vision_config"]
    assert patches.shape == (64 * 64, 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2)


def test_an_assistant_of_simpletuner_is_read_as_a_training_adapter(sample: Sample, tmp_path: Path) -> None:
    transformer = sample.fresh_pipeline().transformer
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    layers = get_peft_model_state_dict(transformer)
    QwenImage21Pipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    model = {"family": FAMILY, "path": "x", "training_adapter": str(tmp_path)}
    config = Config.model_validate({"model": model, "data": {"path": "y"}, "output": {"dir": "z"}})
    adapter = read_training_adapter(config, sample.family)
    assert adapter is not None
    read, expected = pairs_of(*adapter), pairs_of(layers, {"lora_alpha": 4})
    assert len(read) == len(expected) == 8
    assert all(pair.distance(expected[layer]) == 0 for layer, pair in read.items())
