"""Ideogram 4, as a folder of diffusers in bfloat16."""

from diffsynth_lite.releases.components import FLUX2_VAE, MUSUBI
from diffsynth_lite.releases.qwen_image_21 import QWEN3_VL_8B
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_SDNEXT = "SD.Next, data/reference-base.json"
_TRANSFORMER = ReleaseComponent(
    class_name="Ideogram4Transformer2DModel",
    dtype="bfloat16",
    source=f"{MUSUBI}ideogram4/ideogram4_model.py: the defaults of the class; dtype from the name",
)
IDEOGRAM4: tuple[Release, ...] = (
    Release(
        name="Ideogram 4 in bfloat16",
        hub_id="CalamitousFelicitousness/Ideogram-4-bf16-Diffusers",
        pipeline_class="Ideogram4Pipeline",
        components={
            "transformer": _TRANSFORMER,
            "text_encoder": QWEN3_VL_8B,
            "vae": FLUX2_VAE,
            "unconditional_transformer": _TRANSFORMER,
        },
        scheduler=ReleaseComponent(
            class_name="FlowMatchEulerDiscreteScheduler",
            source="signature of the pipeline in diffusers, which computes the noise levels itself",
        ),
        tokenizers={"tokenizer": ReleaseTokenizer(class_name="Qwen2Tokenizer", files=("tokenizer.json",))},
        size=(2048, 2048, 1),
        parameters=9.3e9,
        licence="Ideogram's non-commercial model agreement",
        gated=None,
        architecture="Ideogram-4",
        version="ideogram4",
        sources={
            "pipeline": "signature of the pipeline in diffusers",
            "size": "defaults of the pipeline",
            "parameters": _SDNEXT,
            "licence": "musubi-tuner, docs/ideogram4.md, which calls it non-commercial",
            "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
        },
        unconfirmed=(
            "that the copy, which the makers of the model did not release, has these settings",
            "settings of the scheduler",
            "files of the tokenizer",
        ),
    ),
)
