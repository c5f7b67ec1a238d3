"""Krea 2 edits: batches and single items with woken weights, sizes of images, and the text without any."""

import pytest
import torch
from family_sample import CPU, SIGMA, Sample, encode_texts, mandelbrot
from krea2_edit_reference import ReferencedTransformer, node_size, referenced

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.krea2 import Krea2
from diffsynth_lite.pipelines.krea2_edit import Krea2Edit
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages

FAMILY = "krea2_edit"


# The nodes of ComfyUI see one item at a time, and hide nothing.
@pytest.mark.parametrize("places", [slice(3), slice(1), slice(1, 2), slice(2, 3)])
def test_items_are_predicted_as_by_ai_toolkit_and_by_the_nodes(sample: Sample, places: slice) -> None:
    model = sample.family.load_transformer(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "scale_shift_table" in name or "norm" in name:  # zeros in a new model
                weight.copy_(torch.randn(weight.shape, generator=generator) / 2)
    batch = sample.latents[places], SIGMA[places], sample.conditioning[places]
    inputs = sample.family.model_inputs(batch[2], {"device": CPU, "dtype": torch.float32})
    other = ReferencedTransformer.from_config(model.config)
    other.load_state_dict(model.state_dict())
    other.references = inputs.pop("input_latents_bcfhw")
    with torch.no_grad():
        ours = sample.family.predict(model, *batch)
        theirs = Krea2Edit.model_fn(other, *batch[:2], **inputs)
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_without_images_all_is_as_in_text_to_image(sample: Sample) -> None:
    plain, (prompt,) = Krea2(sample.family.folder), encode_texts(sample.family, "a ring")
    assert torch.equal(prompt["prompt_embeds"], encode_texts(plain, "a ring")[0]["prompt_embeds"])
    batch = sample.latents[:1], SIGMA[:1], [prompt]
    ours, theirs = (family.predict(sample.model, *batch) for family in (sample.family, plain))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [(1024, 1024), (1500, 1000), (3000, 200), (1030, 1020), (7, 9), (24, 40)])
def test_a_reference_has_the_size_of_ai_toolkit_and_of_the_nodes(
    sample: Sample, size: tuple[int, int]
) -> None:
    width, height = size
    high, wide = float(height), float(width)
    if width * height > 1024 * 1024:
        high = (1024 * 1024 * height / width) ** 0.5
        wide = high / (height / width)
    expected = max(16, round(wide / 16) * 16), max(16, round(high / 16) * 16)
    family = Krea2Edit(sample.family.folder)
    assert family.input_size(*size) == expected == node_size(*size)
    with pytest.raises(UserError, match="8000x2 pixels are too narrow for an input image"):
        family.input_size(8000, 2)


@pytest.mark.parametrize("size", [(900, 500), (20, 700)])
def test_the_text_encoder_is_shown_large_and_thin_images_as_in_ai_toolkit(
    sample: Sample, size: tuple[int, int]
) -> None:
    pipeline = referenced(sample.fresh_pipeline())
    pipeline.processor = TextAndImages(tokenizer=pipeline.tokenizer, image_processor=pipeline.processor)
    pipeline.images = [mandelbrot(*size, 20)]
    encode = sample.family.load_prompt_encoder(torch.float32, CPU)
    (ours,) = encode([Prompt(text="a ring", images=tuple(pipeline.images))])
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt("a ring")
    torch.testing.assert_close(ours["prompt_embeds"], theirs[0], rtol=2e-5, atol=2e-5)
