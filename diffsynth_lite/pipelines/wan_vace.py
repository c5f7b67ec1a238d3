"""This file trains Wan VACE: clips that follow a clip of edges, depth or poses, or are regenerated in part.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_wan_vace.py`` and ``pipeline_wan_vace.py``; for what files call the layers
its ``single_file_utils.py`` and ``comfy/ldm/wan/model.py`` of ComfyUI.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel
from PIL import Image, ImageOps

from diffsynth_lite.core.gradient import gradient_checkpoint_forward, unwrapped
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers
from diffsynth_lite.lora.spelling import converted_for_comfyui
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines import wan
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE, LANCZOS, Code
from diffsynth_lite.pipelines.wan.names import WAN_LAYERS, WAN_NAMES
from diffsynth_lite.pipelines.wan.releases import WAN_VACE
from diffsynth_lite.testing import seeded

_GREY = (127, 127, 127)
"""Of what is regenerated where nothing guides it: the middle of what the autoencoder takes."""

_IN_COMFYUI = replace(
    WAN_NAMES,
    renames=(
        ("vace_blocks.*.proj_in", "vace_blocks.*.before_proj"),
        ("vace_blocks.*.proj_out", "vace_blocks.*.after_proj"),
        *WAN_NAMES.renames,
    ),
)
"""Also the names of VACE's further blocks, which diffusers' pipeline does not load."""
_OF_WAN = WAN_LAYERS["transformer"].layers
_LORA_LAYERS = LayerNames.spelled(
    _IN_COMFYUI,
    (
        *_OF_WAN,
        *(f"vace_{layer}" for layer in _OF_WAN if layer.startswith("blocks.*.")),
        *("vace_blocks.*.proj_in", "vace_blocks.*.proj_out", "vace_patch_embedding"),
    ),
)


@model_function
def model_fn_wan_vace(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    control_bcfhw: torch.Tensor,
    control_scale: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Wan VACE, each transformer block run by the gradient engine.

    Args:
        transformer: a ``WanVACETransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, F, H, W), noisy normalised latents, H and W even.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, 512, D) prompt embeddings, filled up with zeros; there is no mask.
        control_bcfhw: (B, 96, F, H, W): normalised latents of what stays (16), of what is regenerated (16),
            and which pixels those are (64, the 8 x 8 of each latent).
        control_scale: (number of the further blocks,), how much each of them counts; None is 1.

    Returns:
        (B, 16, F, H, W), the predicted velocity ``noise - latents``.
    """
    if control_scale is None:
        # As the pipeline has it: always given, in the dtype of the model.
        config: Any = unwrapped(transformer).config
        control_scale = control_bcfhw.new_ones(len(config.vace_layers))
    with checkpointed(WanVACE, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bcfhw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            control_hidden_states=control_bcfhw,
            control_hidden_states_scale=control_scale,
            return_dict=False,
        )[0]
    return velocity_bcfhw


class WanVACE(wan.Wan):
    """Wan 2.1 VACE and 2.2 VACE-Fun: clips that are guided, or regenerated in part, by a prompt and a clip.

    15 blocks, or 8, are added to those of Wan: they see the given clip, and their output is added to that of
    every second, or fifth, of the others. They get a LoRA, too; ``lora.target_modules:
    [vace_blocks.*.attn1.to_q, ...]`` trains only them, as DiffSynth-Studio does.

    The pipeline is given a clip and a mask: the black part of the mask stays as it is, the white part is
    regenerated, guided by the clip's pixels there. Training gives the model the same. With a control, the
    whole clip is regenerated, guided by it. With a mask, its black part shows the item itself, and the rest
    the control or, without one, grey. An item with neither is generated from its prompt only.

    In previews the black part shows ``validation.inputs``, as a still image, or without it the control, so
    that ``validation.control`` and ``validation.inpaint_masks`` are what the pipeline calls ``video`` and
    ``mask``. Its reference images (``reference_images``) are not trained.

    diffusers' pipeline loads no LoRA on the further blocks by the names that ComfyUI takes, so that the file
    has diffusers' own; ``diffsynth-lite convert --to comfyui`` writes it for ComfyUI.

    Wan 2.2 VACE-Fun A14B has two experts, which are trained as in family ``wan``, each with 8 further blocks;
    both see the same control.

    The shift is as in family ``wan``. The authors of VACE-Fun sample it with a shift of 5 and the boundary of
    the folder, 0.875 (``config/wan2.2/wan_civitai_t2v.yaml`` in VideoX-Fun). In the example of
    DiffSynth-Studio it is 0.9.
    """

    pipelines = (WanVACEPipeline,)
    releases = WAN_VACE
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "wan_vace_lora.yaml"}
    transformer_class = WanVACETransformer3DModel
    lora_spelling = converted_for_comfyui(_IN_COMFYUI)
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    block_lists = ("vace_blocks", "blocks")
    model_fn = model_fn_wan_vace
    sequence_split = None
    # What a further block gives waits for the one that it is added to.
    is_counted_by_few_blocks = False
    size_divisor = 16
    latents_id = "wan_vace/latents/1"
    default_num_frames = 81
    default_fps = 16.0
    kinds: ClassVar[tuple[RecordKind, ...]] = ("control", "inpaint", "video", "image")

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """Clips and images with a control or a mask of what is regenerated, or both, or neither."""
        return self.kinds

    @property
    def target_sets(self) -> TargetSets:
        """As in family ``wan``, of all blocks; ``all`` adds the further ones' ``proj_in, proj_out``."""
        sets = super().target_sets
        return {**sets, "all": (*sets["all"], "vace_blocks.*.proj_in", "vace_blocks.*.proj_out")}

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        vae = self.load_component("vae", dtype).to(device)
        # Its methods ask the transformer for its patches.
        return assemble(self.pipeline, vae=vae, transformer=self.empty_component(self.trained[0]))

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        """With a mask, whose numbers are bytes."""
        given, masks = (torch.Size(shape).numel() for shape in self._given_shapes(latents_shape))
        return given + masks // 4

    def _given_shapes(self, latents_shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels, *sides = latents_shape
        return (2 * channels, *sides), (self._vae_config["scale_factor_spatial"] ** 2, *sides)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        given, _ = self._given_shapes(latents_shape)
        return super().example_conditioning(latents_shape) | {"control_latents": torch.ones(given)}

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """Control latents, (32, F, H, W), and, where the item has a mask, that, (64, F, H, W) in bytes."""
        device, (width, height) = pipeline.vae.device, item.frames[0].size
        pixels_bcfhw, mask_bcfhw, references = pipeline.preprocess_conditions(
            **_given_clip(item.frames, item.control, item.inpaint_mask),
            height=height,
            width=width,
            num_frames=len(item.frames),
            dtype=torch.float32,
            device=device,
        )
        latents_bcfhw = pipeline.prepare_video_latents(pixels_bcfhw, mask_bcfhw, references, device=device)
        encoded = {"control_latents": latents_bcfhw[0].float().cpu()}
        if item.inpaint_mask:
            encoded["control_mask"] = pipeline.prepare_masks(mask_bcfhw, references)[0].to("cpu", torch.uint8)
        return encoded

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        control_bcfhw = torch.stack([self._control(sample) for sample in conditioning])
        return super().model_inputs(conditioning, like) | {"control_bcfhw": control_bcfhw.to(**like)}

    def _control(self, sample: Conditioning) -> torch.Tensor:
        """(96, F, H, W) of one sample; without a mask all is regenerated."""
        latents_cfhw, mask_cfhw = sample["control_latents"], sample.get("control_mask")
        if mask_cfhw is None:
            mask_cfhw = latents_cfhw.new_ones(
                self._vae_config["scale_factor_spatial"] ** 2, *latents_cfhw.shape[1:]
            )
        return torch.cat([latents_cfhw, mask_cfhw.to(latents_cfhw)])

    @property
    def pipeline_settings(self) -> dict[str, Any]:
        return {"boundary_ratio": self.boundary}

    def pipeline_for(self, request: PreviewRequest) -> Any:
        return self.pipeline

    def usage_setup(self, request: PreviewRequest) -> Sequence[str]:
        if not request.inpaint_mask:
            return ()
        mask = request.fitted('load_image("mask.png").convert("L")', LANCZOS)
        return (f"mask = {mask}.point(lambda level: 255 * (level > 127))",)

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        """As :meth:`call_arguments`, of a mask that is an image."""
        num_frames, size = request.num_frames, (request.width, request.height)
        guide, staying = request.fitted("frame", LANCZOS), request.fitted(INPUT_IMAGE)
        if request.control:
            read = '[load_image("control.png")]' if num_frames == 1 else 'load_video("control.mp4")'
            is_mixed = request.inputs and request.inpaint_mask
            frame = f"Image.composite({guide}, {staying}, mask)" if is_mixed else guide
            video = f"[{frame} for frame in {read}[:{num_frames}]]"
        elif request.inpaint_mask:
            grey = f'Image.new("RGB", {size}, {_GREY})'
            video = f"[Image.composite({grey}, {staying}, mask)] * {num_frames}"
        else:
            return {}
        mask = {"mask": Code(f"[mask] * {num_frames}")} if request.inpaint_mask else {}
        return {"video": Code(video), **mask}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        staying: Sequence[Image.Image] = request.control
        if request.inputs:
            staying = [ImageOps.fit(request.inputs[0], (request.width, request.height))] * request.num_frames
        given = _given_clip(staying, request.control, request.inpaint_mask)
        return {self.scale_argument: request.guidance_scale, **given}


def _given_clip(
    staying: Sequence[Image.Image], control: Sequence[Image.Image], mask: Sequence[Image.Image]
) -> dict[str, list[Image.Image] | None]:
    """What the pipeline calls ``video`` and ``mask``; None where nothing is given.

    Args:
        staying: frames whose pixels are kept where the mask is black.
        control: frames that guide the regenerated part; without them it is grey.
        mask: mode "L", of each frame: white is regenerated; none: all is.
    """
    if not mask:
        return {"video": list(control) or None, "mask": None}
    guides = control or [Image.new("RGB", mask[0].size, _GREY)] * len(mask)
    video = [Image.composite(*frames) for frames in zip(guides, staying, mask, strict=True)]
    return {"video": video, "mask": list(mask)}


def tiny() -> WanVACEPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    To the two blocks of ``wan`` comes a further one.
    """
    parts = wan.tiny().components
    parts["transformer"] = tiny_wan_vace_transformer(parts["transformer"].config.text_dim)
    return WanVACEPipeline(**parts)


def tiny_wan_vace_transformer(text_dim: int, *, seed: int = 0) -> WanVACETransformer3DModel:
    """A random Wan VACE transformer in eval mode: two blocks of 24 channels, and two further ones."""
    with seeded(seed):
        return WanVACETransformer3DModel(
            num_layers=3,
            vace_layers=[0, 2],
            num_attention_heads=2,
            attention_head_dim=12,
            ffn_dim=32,
            text_dim=text_dim,
            rope_max_seq_len=32,
        ).eval()
