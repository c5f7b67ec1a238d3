"""This file lists the release of MiniMax-H3, and the layers that a LoRA on it may be on.

Sources of the names: diffusers' model and its ``single_file_utils.py``, for those of the original; ComfyUI's
``comfy/ldm/minimax/model.py`` (003617c441f2), which has these.
"""

from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, Original, renamed, under
from diffsynth_lite.lora.shared_names import DOUBLE, QKV
from diffsynth_lite.releases.components import QWEN3_VL_8B, encoder_sizes
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

AUDIO_SHIFT = 3.0
_CARD = "MiniMaxAI/MiniMax-H3, its model_index.json"
_STUDIO = "DiffSynth-Studio, diffsynth/models/minimax_h3_text_encoder.py"
_DEFAULTS = "defaults of the class, which its documentation gives as those of the release"

MINIMAX_H3: tuple[Release, ...] = (
    Release(
        name="MiniMax-H3",
        hub_id="MiniMaxAI/MiniMax-H3",
        pipeline_class="MiniMaxH3ModularPipeline",
        components={
            "transformer": ReleaseComponent(
                "MiniMaxH3Transformer3DModel",
                dtype="bfloat16",
                source=f"{_DEFAULTS}; its 61.7 GB are in the docstring of MiniMaxH3Blocks",
            ),
            "text_encoder": ReleaseComponent(
                "Qwen3VLForConditionalGeneration",
                {
                    "text_config": {
                        "model_type": "qwen3_vl_text",
                        **encoder_sizes(5120, 25600, 64, 64, 8, 151936, 128),
                    },
                    "vision_config": {**QWEN3_VL_8B.config["vision_config"], "out_hidden_size": 5120},
                    "tie_word_embeddings": False,
                },
                dtype="bfloat16",
                source=f"{_CARD}: class; {_STUDIO}: settings and dtype; its 64 layers: corechan/"
                "MiniMax_H3_Torchao018, which splits them",
            ),
            "vae": ReleaseComponent("AutoencoderKLMiniMaxH3", dtype="float32", source=_DEFAULTS),
            "audio_vae": ReleaseComponent("AutoencoderKLMiniMaxH3Audio", dtype="float32", source=_DEFAULTS),
        },
        scheduler=ReleaseComponent(
            "MiniMaxH3Scheduler", {"shift": 12.0}, source="docstring of the class: 12 for clips, 3 for audio"
        ),
        tokenizers={
            "tokenizer": ReleaseTokenizer("Qwen2TokenizerFast"),
            "processor": ReleaseTokenizer("Qwen3VLProcessor"),
            "audio_scheduler": ReleaseTokenizer("MiniMaxH3Scheduler"),
        },
        size=(1344, 768, 124),
        parameters=33e9,
        licence="MiniMax H3 Community License Agreement",
        gated=None,
        sources={
            "pipeline": _CARD,
            "size": "defaults of its blocks",
            "parameters": "33B in diffusers' pull request 14355",
            "licence": "MiniMaxAI/MiniMax-H3, LICENSE of 2 August 2026",
            "architecture": "no program is known to give it one",
        },
        unconfirmed=("means and deviations of the latents", "files of the tokenizer"),
    ),
)

_REFINER = "token_refiner.refiner_blocks.*"
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
_ORIGINAL = {
    **{
        f"{theirs}.{name}": place
        for theirs, ours in {"blocks.*": DOUBLE, "token_refiner.blocks.*": _REFINER}.items()
        for name, place in {
            "attn.qkv_proj": Original(under(f"{ours}.attn", QKV), rows=(1, 1, 1)),
            "attn.out_proj": renamed(f"{ours}.attn.to_out.0"),
            "mlp.fc1": Original((f"{ours}.ff.net.0.proj",), is_gated=True),
            "mlp.fc2": renamed(f"{ours}.ff.net.2"),
        }.items()
    },
    "blocks.*.adaln_proj.linear": renamed(f"{DOUBLE}.adaln_proj.linear"),
    "video_patch_proj": renamed("proj_in"),
    "audio_patch_proj": renamed("audio_proj_in"),
    "condition_proj": renamed("context_embedder"),
    "time_embedder.proj_in": renamed("time_embedder.linear_1"),
    "time_embedder.proj_out": renamed("time_embedder.linear_2"),
    "final_layer.adaln_proj.linear": renamed("norm_out.linear"),
    "final_layer.video_out": renamed("proj_out"),
    "final_layer.audio_out": renamed("audio_proj_out"),
}
LORA_LAYERS: LoraLayers = {
    "transformer": LayerNames(
        layers=tuple(layer for place in _ORIGINAL.values() for layer in place.layers), kohya=_ORIGINAL
    )
}
