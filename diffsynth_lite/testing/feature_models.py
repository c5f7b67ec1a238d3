"""Small random models that see images, in folders as the hub has DINOv2 and SigLIP: for tests of scores."""

from pathlib import Path

from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.tokenizers import gemma_tokenizer

_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES = {"image_size": 16, "patch_size": 8}


def save_tiny_dinov2(folder: Path, *, seed: int = 0) -> Path:
    """Save a random DINOv2, of 20 kB, which sees images of 16 pixels a side; returns ``folder``."""
    with seeded(seed):
        model = Dinov2Model(Dinov2Config(**_SIZES, **_IMAGES, mlp_ratio=2))
    model.save_pretrained(folder)
    sides = {"height": 16, "width": 16}
    BitImageProcessorPil(size={"shortest_edge": 16}, crop_size=sides).save_pretrained(folder)
    return folder


def save_tiny_siglip(folder: Path, *, seed: int = 0) -> Path:
    """Save a random SigLIP 2, of 100 kB, which sees images of 16 pixels a side; returns ``folder``."""
    tokenizer = gemma_tokenizer(["a", "red", "blue", "circle", "square"])
    inner = {**_SIZES, "intermediate_size": 32}
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {**inner, **tokens, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    text["projection_size"] = 16
    with seeded(seed):
        model = SiglipModel(SiglipConfig(text_config=text, vision_config={**inner, **_IMAGES}))
    for part in (model, tokenizer, SiglipImageProcessorPil(size={"height": 16, "width": 16})):
        part.save_pretrained(folder)
    return folder
