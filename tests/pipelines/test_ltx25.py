"""LTX-2.5 against diffusers' modular blocks for it, and its pipelines."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX25ModularPipeline
from diffusers.guiders import LTX2Guidance
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx2 import LTX2AutoDecoderStep
from diffusers.pipelines.ltx2 import LTX2ReferenceCondition, LTX2VideoCondition
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES
from diffusers_pipelines import bytes_of
from family_sample import CPU, PROMPTS, Sample, adapted_transformer, encode_sample, transformer_calls
from release_layouts import ltx_2_3, ltx_2_5, other_guidance
from test_ltx2_in_context import CONTROL, SIZE, START, unpacked

from diffsynth_lite.lora import adapter_settings, adapter_tensors, find_target_layers
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.release_folder import differences, num_parameters, write_release
from diffsynth_lite.pipelines.ltx2 import LTX2, tiny
from diffsynth_lite.pipelines.ltx2.releases import LTX_2
from diffsynth_lite.training.lora_file import read_initial_lora

FOLLOWED = LTX2ReferenceCondition(frames=list(CONTROL))
STARTED = [LTX2VideoCondition(frames=START)]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({}, {}),
    "image": ({"first_frame": START}, {"image": START}),
    "control": (
        {"first_frame": START, "control": CONTROL},
        {"conditions": STARTED, "reference_conditions": FOLLOWED, "reference_downscale_factor": 2},
    ),
}
"""What an item has next to its clip, and what diffusers is given for it."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """With weights in place of the zeros and ones that a new model has."""
    pipeline, folder = ltx_2_5(), tmp_path_factory.mktemp("ltx25")
    generator = torch.Generator().manual_seed(7)
    for model in (pipeline.transformer, pipeline.text_encoder.model, pipeline.connectors):
        for tensor in model.state_dict().values():
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    pipeline.save_pretrained(folder)
    return encode_sample("ltx2", ltx_2_5, LTX2(PipelineFolder(path=folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_at_each_step_training_runs_the_model_as_the_modular_blocks_do(sample: Sample, kind: str) -> None:
    family, pipeline, (given, arguments) = LTX2(sample.family.folder), LTX25ModularPipeline(), KINDS[kind]
    pipeline._blocks.sub_blocks["decode"] = LTX2AutoDecoderStep()
    parts = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path).components
    parts |= {name: LTX2Guidance(enabled=False) for name in ("guider", "audio_guider")}
    pipeline.update_components(**{name: part for name, part in parts.items() if part is not None})
    family.with_audio, family.with_controls, family.control_downscale = True, kind == "control", 2
    (encoded,) = family.load_media_encoder(torch.float32, CPU)([Media(frames=CONTROL, fps=24.0, **given)])
    shape, outputs = encoded.pop("latents").shape, list[Any]()
    pipeline.transformer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    call = {"prompt": list(PROMPTS[:2]), "num_inference_steps": 3, "output_type": "latent", **SIZE}
    call["generator"] = torch.Generator().manual_seed(1)
    theirs = transformer_calls(pipeline.transformer, partial(pipeline, **call, **arguments))
    assert len(theirs) == 3
    conditioning = [prompt | encoded for prompt in sample.prompts[:2]]
    for seen, output in zip(theirs, outputs, strict=True):
        for name, stream in (("prompt_embeds", ""), ("audio_prompt_embeds", "audio_")):
            expected = seen[f"{stream}encoder_hidden_states"]
            ours = torch.stack([prompt[name] for prompt in sample.prompts[:2]])
            assert (ours - expected).norm() <= 2e-5 * expected.norm()
        noisy = unpacked(seen["hidden_states"], seen["audio_hidden_states"], shape)
        with torch.no_grad():
            predicted = family.predict_with_audio(sample.model, *noisy, seen["sigma"] / 1000, conditioning)
        for one, expected in zip(predicted, unpacked(*output, shape), strict=True):
            assert (one - expected).norm() <= 1e-6 * expected.norm()


def test_a_preview_of_the_distilled_model_has_its_noise_levels(sample: Sample) -> None:
    """And starts from an image as compressed as its text encoder has the pipeline take it."""
    family, steps = sample.family, len(DISTILLED_SIGMA_VALUES)
    request = sample.request(num_inference_steps=steps, guidance_scale=1.0, seed=5)
    request = replace(request, inputs=(START,), **SIZE)
    (ours,) = family.sample(sample.model, torch.float32, [request])
    pipeline = LTX2ImageToVideoPipeline.from_pretrained(family.folder.path)
    call = {"prompt": PROMPTS[0], "image": START, "num_frames": 17, "sigmas": DISTILLED_SIGMA_VALUES}
    call |= other_guidance(family.folder, False) | request.call_arguments()
    assert bytes_of(ours) == bytes_of(pipeline(**call).frames[0])
    assert family.usage_arguments(request)["sigmas"] == DISTILLED_SIGMA_VALUES
    assert "sigmas" not in family.usage_arguments(replace(request, num_inference_steps=steps + 1))


@pytest.mark.parametrize("build", [tiny, ltx_2_3])
def test_a_run_starts_from_a_lora_of_an_earlier_release(sample: Sample, build: Any, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    earlier = LTX2(PipelineFolder(path=tmp_path))
    targets, unused = earlier.target_sets["all"], sample.family.unused_modules(sample.model)
    learned = adapted_transformer(earlier, targets=targets)
    tensors = adapter_tensors(learned)
    earlier.lora_files.save(tmp_path, tensors, adapter_settings(learned))
    layers = find_target_layers(sample.model, targets, unused_modules=unused)
    initial = read_initial_lora(sample.family, str(tmp_path), layers=layers, rank=4, alpha=8)
    assert initial.keys() == tensors.keys()
    assert all(torch.equal(initial[name], tensor) for name, tensor in tensors.items())


def test_a_file_of_the_full_model_brings_its_sampler(sample: Sample, tmp_path: Path) -> None:
    folder = sample.family.folder
    (weights,) = folder.files_to_load("transformer")
    found = []
    for name in ("ltx-2.5-22b-dev.safetensors", "ltx-2.5-22b-distilled.safetensors"):
        file = ComponentFile(path=tmp_path / name, key="model.transformer_file")
        file.path.symlink_to(weights)
        family = LTX2(replace(folder, files={"transformer": file}))
        family.check_folder()
        config = family.load_scheduler().config
        given = SimpleNamespace(scheduler=sample.family.load_scheduler())
        request = sample.request(num_inference_steps=2, guidance_scale=1.0, seed=0)
        exec("\n".join(family.usage_setup(request)), {"pipeline": given})
        assert given.scheduler.config == config
        found.append((config.use_dynamic_shifting, config.shift_terminal, family.distilled is None))
    assert found == [(True, 0.1, True), (False, None, False)]


def test_the_release_may_have_parts_that_are_not_used_and_has_an_encoder_of_its_size(tmp_path: Path) -> None:
    *_, release = LTX_2
    index = write_release(release, tmp_path).path / "model_index.json"
    parts = {"duration_head": ["ltx2", "LTX2DurationHead"], "processor": ["transformers", "Gemma4Processor"]}
    index.write_text(json.dumps(json.loads(index.read_text()) | parts))
    assert differences(release, PipelineFolder(path=tmp_path)) == {}
    encoder = release.components["text_encoder"]
    # google/gemma-4-12B has 11,959,730,224 numbers; one in each of 48 layers is not a parameter.
    assert num_parameters(encoder) + 48 == 11_959_730_224
