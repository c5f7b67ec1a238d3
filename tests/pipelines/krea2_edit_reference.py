"""Krea 2 edits as ai-toolkit and its nodes for ComfyUI have them, written out on parts of diffusers' model.

Sources: those of ``diffsynth_lite/pipelines/krea2_edit.py``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel
from PIL import Image
from torch.nn.functional import gelu, interpolate, pixel_unshuffle
from transformers import Qwen2VLImageProcessorPil


class ReferencedTransformer(Krea2Transformer2DModel):
    """Text, noisy tokens and clean ones, modulated span by span.

    Attributes:
        references: clean latents that are not among the tokens yet, each (B, 16, 1, H, W).
    """

    references: Sequence[torch.Tensor] = ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        position_ids: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor]:
        text, tokens, places = (
            encoder_hidden_states,
            [hidden_states],
            [position_ids[-hidden_states.shape[1] :]],
        )
        for index, latents in enumerate(self.references, start=1):
            patches = pixel_unshuffle(latents[:, :, 0], 2)
            tokens.append(patches.flatten(2).transpose(1, 2))
            rows, columns = map(torch.arange, patches.shape[-2:])
            places.append(torch.cartesian_prod(torch.tensor([index]), rows, columns))
        where, image = torch.cat(places), self.img_in(torch.cat(tokens, dim=1))
        end = text.shape[1] + int((where[:, 0] == 0).sum())  # of what is noisy
        mask, all_mask = encoder_attention_mask, None
        if mask is not None:
            all_mask = torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1)[:, None, None]
            mask = mask[:, None, None]
        hidden = torch.cat([self.txt_in(self.text_fusion(text, mask)), image], dim=1)
        rotary = self.rotary_emb(torch.cat([torch.zeros(text.shape[1], 3), where]))
        at, zero = (self.time_embed(level, dtype=image.dtype) for level in (timestep, 0 * timestep))
        levels = [self.time_mod_proj(gelu(level, approximate="tanh")) for level in (at, zero)]

        def scaled(sequence: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([scales[0] * sequence[:, :end], scales[1] * sequence[:, end:]], dim=1)

        for block in self.transformer_blocks:
            table, one = block.scale_shift_table, torch.ones_like(hidden)
            of_each = zip(
                *((level.unflatten(-1, (6, -1)) + table).unbind(-2) for level in levels), strict=True
            )
            scales, shifts, gates, more_scales, more_shifts, more_gates = of_each
            given = block.norm1(hidden) + scaled(block.norm1(hidden), scales) + scaled(one, shifts)
            hidden = hidden + scaled(block.attn(given, all_mask, rotary), gates)
            given = block.norm2(hidden) + scaled(block.norm2(hidden), more_scales) + scaled(one, more_shifts)
            hidden = hidden + scaled(block.ff(given), more_gates)
        return (self.final_layer(hidden, at)[:, text.shape[1] : end],)


def node_size(width: int, height: int) -> tuple[int, int]:
    """Of a reference in ComfyUI."""
    scale = min(1.0, (1024 * 1024 / (width * height)) ** 0.5)
    return max(round(width * scale / 16) * 16, 16), max(round(height * scale / 16) * 16, 16)


class ReferencedPipeline(Krea2Pipeline):
    """diffusers' loop around that model; ``processor`` is set to one of texts and images."""

    def encode_prompt(self, prompt: str | list[str], **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text, seen = self.prompt_template_encode_prefix, []
        for place, image in enumerate(self.images, start=1):
            text += f"Picture {place}: <|vision_start|><|image_pad|><|vision_end|>"
            scale = min(1, (384 * 384 / (image.width * image.height)) ** 0.5)
            size = [max(28, round(side * scale)) for side in image.size]
            seen.append(image.resize(size, Image.Resampling.BICUBIC))
        given = self.processor(text=[text + "".join(prompt)], images=seen, padding=True, return_tensors="pt")
        end = self.tokenizer([self.prompt_template_encode_suffix], return_tensors="pt")["input_ids"]
        ids = torch.cat([given.pop("input_ids"), end], dim=1)
        given["attention_mask"] = torch.ones_like(ids)
        types = (ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        states = self.text_encoder(ids, mm_token_type_ids=types, output_hidden_states=True, **given)
        rows = torch.stack([states.hidden_states[layer] for layer in self.text_encoder_select_layers], dim=2)
        return rows[:, 34:], torch.ones(1, rows.shape[1] - 34, dtype=torch.bool)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        image: Any,
        negative_prompt: str | None = None,
        guidance_scale: float = 4.5,
        *,
        width: int,
        height: int,
        num_inference_steps: int,
        generator: torch.Generator,
    ) -> Any:
        self.images, self.transformer.references = image if isinstance(image, list) else [image], []
        mean, std = (torch.tensor(self.vae.config[f"latents_{name}"]) for name in ("mean", "std"))
        for one in self.images:
            pixels = self.image_processor.numpy_to_pt(self.image_processor.pil_to_numpy(one))
            pixels = interpolate(pixels, node_size(*one.size)[::-1], mode="area")
            encoded = self.vae.encode(pixels[:, :, None] * 2 - 1).latent_dist.mode()
            self.transformer.references.append(((encoded.movedim(1, -1) - mean) / std).movedim(-1, 1))
        asked = {"guidance_scale": guidance_scale, "generator": generator}
        return super().__call__(prompt, negative_prompt, height, width, num_inference_steps, **asked)


def referenced(pipeline: Any) -> Any:
    """diffusers' pipeline of Krea 2, from then on one of edits."""
    pipeline.__class__, pipeline.transformer.__class__ = ReferencedPipeline, ReferencedTransformer
    sizes = {"patch_size": 16, "min_pixels": 65536, "max_pixels": 16777216}
    pipeline.processor = Qwen2VLImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.5] * 3, **sizes)
    return pipeline
