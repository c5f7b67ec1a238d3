"""This file builds a small pipeline of LTX-2, with all of its parts, and the text encoder of LTX-2.5."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration, GemmaTokenizer

from diffsynth_lite.pipelines.ltx_video.releases import LTX_SCHEDULER
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers


def tiny() -> LTX2Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second: LTX-2 19B.

    Two blocks of 32 channels, and 16 of audio; the real compression, and the sampler of the released model.
    """
    tokenizer, vae, audio_vae = (
        tokenizers.gemma_tokenizer(),
        autoencoders.tiny_ltx2_vae(),
        autoencoders.tiny_ltx2_audio_vae(),
    )
    tokenizer.model_max_length = 1024
    text_encoder = text_encoders.tiny_gemma3(tokenizer)
    width = text_encoder.config.text_config.hidden_size
    num_hidden_states = text_encoder.config.text_config.num_hidden_layers + 1
    with seeded(0):
        vocoder = LTX2Vocoder(
            in_channels=audio_vae.config.output_channels * audio_vae.config.mel_bins,
            hidden_channels=32,
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
        )
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**LTX_SCHEDULER.config),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        connectors=tiny_connectors(caption_channels=width, text_proj_in_factor=num_hidden_states),
        transformer=tiny_transformer(caption_channels=width),
        vocoder=vocoder.eval(),
    )


def tiny_transformer(*, seed: int = 0, **layout: Any) -> LTX2VideoTransformer3DModel:
    """A random transformer in eval mode: two blocks of 32 channels, and 16 of audio."""
    with seeded(seed):
        return LTX2VideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            audio_in_channels=16,
            audio_out_channels=16,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            rope_type="split",
            **layout,
        ).eval()


def tiny_connectors(*, seed: int = 0, **layout: Any) -> LTX2TextConnectors:
    """Random connectors in eval mode: one block for each stream, of 16 channels, with the real registers."""
    settings: dict[str, Any] = {"rope_type": "split"}
    for stream in ("video", "audio"):
        settings |= {
            f"{stream}_connector_num_attention_heads": 2,
            f"{stream}_connector_attention_head_dim": 8,
            f"{stream}_connector_num_layers": 1,
        }
    with seeded(seed):
        return LTX2TextConnectors(**settings | layout).eval()


def tiny_gemma4(tokenizer: GemmaTokenizer, *, seed: int = 0) -> Gemma4UnifiedForConditionalGeneration:
    """A random Gemma 4 without encoders, with two layers, of either kind: of LTX-2.5.

    That of full attention has wider heads, whose values are their keys, as in the 12B. It is not among the
    encoders of other families, because transformers has had its class since 5.10.
    """
    config = Gemma4UnifiedConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 16},
        audio_config={"audio_embed_dim": 16},
    )
    with seeded(seed):
        return Gemma4UnifiedForConditionalGeneration(config).eval()
