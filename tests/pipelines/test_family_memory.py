"""The memory of a step is counted as it is held on the CPU, and all of a batch goes to one device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from family_sample import Sample, adapted_transformer, engine_with
from held_step import assert_same_cost, step_on_cpu
from torch.utils._pytree import tree_leaves

from diffsynth_lite.config import load_config
from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, blocks_of, gradient_engine
from diffsynth_lite.core.planning.kernels import ON_ALL_DEVICES, FusedKernels, backward_in_scope
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.lora.kinds import LORA, Dora, Lokr
from diffsynth_lite.training.planning.inference_count import count_media_encoder, count_prompt_encoder
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
    # One that has not run: Qwen-Image keeps a table of positions.
    family, model = sample.family, adapted_transformer(sample.family, kind=kind)
    inputs = {"latents_shape": sample.latents.shape[1:], "conditioning": sample.conditioning[0]}
    plain = family.empty_transformer()
    layers = find_target_layers(
        plain, family.default_target_modules, unused_modules=family.unused_modules(plain)
    )
    _ = family.noise_path  # UNets keep a table of it, on the CPU
    counted = MemoryCounter(family, layers, rank=4, kind=kind, **inputs).count(settings)
    held = step_on_cpu(family, model, settings, **inputs)
    # Two models read the numbers of a mask, a byte a token, which is on the CPU while it is counted.
    mask = 0
    if sample.name == "lumina2":
        mask = settings.micro_batch_size * len(sample.conditioning[0]["prompt_embeds"])
    if sample.name == "qwen_image_21":
        mask = len(sample.conditioning[0]["prompt_embeds"]) + family.num_tokens(sample.latents.shape[1:])
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
    file.write_text(f"model: {{family: {name}, path: x}}\ndata: {{path: images}}\noutput: {{dir: run}}")
    config = load_config(str(file), []).config
    size = Bucket(width=width, height=height, num_frames=len(media.frames), num_layers=len(media.layers))
    of_media = count_media_encoder(config, family, size, len(media.inputs))
    of_prompts = count_prompt_encoder(config, family, size, len(media.inputs))
    pixels = width * height * len(media.frames)
    assert of_media.device > 0
    assert of_media.calls > pixels
    assert of_prompts.device > 0
    assert of_prompts.calls > family.max_prompt_tokens


META = torch.device("meta")


def test_all_that_a_batch_holds_goes_to_the_device_of_the_model(sample: Sample) -> None:
    transformer = sample.family.empty_transformer().requires_grad_(False)
    for block in blocks_of(transformer, sample.family.block_lists):
        block.requires_grad_(True)
    given: list[Any] = []
    transformer.register_forward_pre_hook(
        lambda _module, args, kwargs: given.extend(tree_leaves((args, kwargs))), with_kwargs=True
    )
    try:
        with FusedKernels(ON_ALL_DEVICES):  # in which plans are made
            predicted = predict_on_meta(sample, transformer)
            backward_in_scope(predicted.square().mean())
    except NotImplementedError as error:
        if not given or "Cannot copy out of meta tensor" not in str(error):
            raise
        assert {value.device for value in given if isinstance(value, torch.Tensor)} == {META}
        return  # the model itself reads a number back, as Lumina 2 reads how long prompts are
    assert predicted.device == META
    assert predicted.shape == sample.latents.shape


def predict_on_meta(sample: Sample, transformer: torch.nn.Module) -> torch.Tensor:
    """Torch refuses to compute with tensors of two devices, and to read a number back from this one."""
    sigma = torch.empty(len(sample.latents), device=META)
    with gradient_engine(engine_with((True, False))):
        return sample.family.predict(transformer, sample.latents.to(META), sigma, sample.conditioning)
