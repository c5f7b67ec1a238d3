"""What a step of each family is counted to hold is what it holds on the CPU, to the byte."""

from dataclasses import replace
from pathlib import Path

import torch
from family_sample import Sample, adapted_transformer
from held_step import assert_same_cost, step_on_cpu

from diffsynth_lite.config import load_config
from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy
from diffsynth_lite.data import Bucket
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.lora.kinds import LORA, Dora, Lokr
from diffsynth_lite.training.planning.encoder_count import count_media_encoder, count_prompt_encoder
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings


def test_a_step_holds_what_is_counted_of_blocks_that_are_kept_and_of_those_that_are_recomputed(
    sample: Sample,
) -> None:
    settings = StepSettings(
        micro_batch_size=2,
        mixed_precision="no",
        policy=BlockPolicy(select="every_n", n=2, selected=BlockStrategy(save_attention="keep")),
        dtype=torch.float32,
        device_type="cpu",
    )
    kind = {"qwen_image": Dora(), "z_image": Lokr(factor=2)}.get(sample.name, LORA)
    family, model = sample.family, adapted_transformer(sample, kind=kind)
    inputs = {"latents_shape": sample.latents.shape[1:], "conditioning": sample.conditioning[0]}
    plain = family.empty_transformer()
    layers = find_target_layers(
        plain, family.default_target_modules, unused_modules=family.unused_modules(plain)
    )
    _ = family.noise_path  # UNets keep a table of it, on the CPU
    counted = MemoryCounter(family, layers, rank=4, kind=kind, **inputs).count(settings)
    held = step_on_cpu(family, model, settings, **inputs)
    # Qwen-Image 2.1 reads the numbers of a mask, a byte a token, which is on the CPU while it is counted.
    tokens = len(sample.conditioning[0]["prompt_embeds"]) + family.num_tokens(sample.latents.shape[1:])
    mask = tokens if sample.name == "qwen_image_21" else 0
    assert_same_cost(counted.step, replace(held, kept=held.kept - mask, peak=held.peak - mask))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    norms = [norm for name, norm in model.named_buffers() if name.endswith("row_norms")]
    assert (len(norms) > 0) == (kind == Dora())
    assert counted.lora == sum(tensor.nbytes for tensor in (*trained, *norms))
    tensors = [*model.parameters(), *model.buffers()]
    assert counted.weights == sum(tensor.nbytes for tensor in tensors) - counted.lora


def test_what_encoding_takes_can_be_counted(sample: Sample, tmp_path: Path) -> None:
    media, family = sample.media[0], sample.family
    width, height = media.frames[0].size
    file = tmp_path / "run.yaml"
    name = sample.name.partition(" ")[0]  # of a layout, that of its family
    file.write_text(f"model: {{family: {name}, path: x}}\ndata: {{path: pictures}}\noutput: {{dir: run}}")
    config = load_config(str(file), []).config
    size = Bucket(width=width, height=height, num_frames=len(media.frames), num_layers=len(media.layers))
    of_media = count_media_encoder(config, family, size, len(media.inputs))
    of_prompts = count_prompt_encoder(config, family, size, len(media.inputs))
    pixels = width * height * len(media.frames)
    assert of_media.device > 0
    assert of_media.calls > pixels
    assert of_prompts.device > 0
    assert of_prompts.calls > family.max_prompt_tokens
