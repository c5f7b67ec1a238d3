"""This file makes prompt embeddings with the two CLIP text encoders of SDXL, also where these are trained.

Layouts: b batch; l tokens, d channels.
Source: ``encode_prompt`` in diffusers ``pipeline_stable_diffusion_xl.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.base.family import Conditioning

_EMBEDS = ("prompt_embeds", "pooled_prompt_embeds")
_TOKENS = ("input_ids", "input_ids_2")


def clip_prompt_encoder(
    tokenizers: Sequence[Any],
    encoders: Sequence[torch.nn.Module],
    device: torch.device,
    *,
    zeros_for_empty: bool,
) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
    """A function from prompts to their embeddings, or to their tokens where the encoders are trained.

    Args:
        encoders: the ``CLIPTextModel`` and the ``CLIPTextModelWithProjection``; empty for tokens only.
        zeros_for_empty: an empty prompt that guidance steers away from has zeros for embeddings.
    """

    @torch.no_grad()
    def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
        texts = [prompt.text for prompt in prompts]
        names, columns = _TOKENS, tuple(_token_ids(tokenizer, texts).to(device) for tokenizer in tokenizers)
        if encoders:
            names, columns = _EMBEDS, _encode(encoders, columns)
        return [
            {"is_zero": torch.tensor(zeros_for_empty and prompt.is_negative and not prompt.text.strip())}
            | {name: tensor.cpu().clone() for name, tensor in zip(names, row, strict=True)}
            for prompt, *row in zip(prompts, *columns, strict=True)
        ]

    return encode


def clip_prompt_embeds(
    encoders: Sequence[torch.nn.Module], conditioning: Sequence[Conditioning], like: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt embeddings of what :func:`clip_prompt_encoder` gave, with gradients where it gave tokens.

    Args:
        encoders: those that are trained; empty where ``conditioning`` holds embeddings.

    Returns:
        (B, 77, D), what goes into the last layers of both encoders, side by side; (B, D_pooled), of the
        second one.
    """
    names = _TOKENS if encoders else _EMBEDS
    first, second = (torch.stack([sample[name] for sample in conditioning]) for name in names)
    if encoders:
        first, second = _encode(encoders, (first.to(like["device"]), second.to(like["device"])))
    # A product keeps the graph: DDP waits for a gradient of each encoder also in a batch of zeros only.
    kept_b = torch.stack([~sample["is_zero"] for sample in conditioning]).to(like["device"])
    return first.to(**like) * kept_b[:, None, None], second.to(**like) * kept_b[:, None]


def _token_ids(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    token_ids: torch.Tensor = tokenizer(
        list(texts),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return token_ids


def _encode(
    encoders: Sequence[torch.nn.Module], token_ids: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = [
        encoder(ids, output_hidden_states=True) for encoder, ids in zip(encoders, token_ids, strict=True)
    ]
    return torch.cat([output.hidden_states[-2] for output in outputs], dim=-1), outputs[-1].text_embeds
