"""Anima."""

from diffsynth_lite.releases.components import DIFFUSERS, ONE_TRAINER, QWEN_VAE
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_CONVERTED = f"{DIFFUSERS}scripts/convert_anima_to_diffusers.py"
_BYTES = "the bytes of the files of circlestone-labs/Anima, which it was converted from, in public loaders"
_NOTES = "serenitymojo, a public port, its notes on Anima"
ANIMA: tuple[Release, ...] = (
    Release(
        name="Anima Base 1.0",
        hub_id="circlestone-labs/Anima-Base-v1.0-Diffusers",
        pipeline_class="AnimaModularPipeline",
        components={
            "transformer": ReleaseComponent(
                class_name="CosmosTransformer3DModel",
                config={
                    "extra_pos_embed_type": None,
                    "num_attention_heads": 16,
                    "rope_scale": (1.0, 4.0, 4.0),
                },
                dtype="bfloat16",
                source="Cosmos-2.0-Diffusion-2B-Text2Image in "
                f"{DIFFUSERS}scripts/convert_cosmos_to_diffusers.py; its config.json in {_NOTES}; dtype from "
                f"{_BYTES}",
            ),
            "text_conditioner": ReleaseComponent(
                class_name="AnimaTextConditioner",
                dtype="bfloat16",
                source=f"defaults of the class; {_CONVERTED}; dtype of the transformer, whose file holds it",
            ),
            "text_encoder": ReleaseComponent(
                class_name="Qwen3Model",
                config={
                    "head_dim": 128,
                    "hidden_size": 1024,
                    "intermediate_size": 3072,
                    "num_attention_heads": 16,
                    "num_hidden_layers": 28,
                    "num_key_value_heads": 8,
                    "tie_word_embeddings": False,
                    "vocab_size": 151936,
                },
                dtype="bfloat16",
                source=f"Qwen3-0.6B, by {_CONVERTED}; dtype from {_BYTES}",
            ),
            "vae": QWEN_VAE,
        },
        scheduler=ReleaseComponent(
            class_name="FlowMatchEulerDiscreteScheduler", config={"shift": 3.0}, source=_CONVERTED
        ),
        tokenizers={
            "tokenizer": ReleaseTokenizer(class_name="Qwen2Tokenizer", files=("tokenizer.json",)),
            "t5_tokenizer": ReleaseTokenizer(class_name="T5Tokenizer", files=("tokenizer.json",)),
        },
        size=(1024, 1024, 1),
        parameters=2e9,
        licence="CircleStone Labs Non-Commercial, which allows commercial use of pictures; made from a model "
        "under the NVIDIA Open Model License",
        gated=None,
        architecture="Anima",
        version=None,
        sources={
            "pipeline": "local-ai skills, anima references, of its modular_model_index.json; class of the "
            "tokenizers: a public converter, which writes the same index",
            "size": "defaults of the pipeline",
            "parameters": "the card of the model on the hub",
            "licence": "discussion 37 of circlestone-labs/Anima on the hub",
            "architecture": f"{ONE_TRAINER}anima-lora.json",
        },
        unconfirmed=("whether it is gated", "files of the tokenizers"),
    ),
)
