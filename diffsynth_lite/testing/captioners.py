"""Small random models that caption, saved in folders as the hub has them: for tests of what uses one.

They write words of their vocabulary, which depend on the images and on the instruction, and mean nothing.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Qwen2VLImageProcessorPil

from diffsynth_lite.files import write_json
from diffsynth_lite.testing.text_encoders import tiny_qwen3_vl_lm
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer

_WORDS = (
    "a",
    "red",
    "blue",
    "cat",
    "dog",
    "sits",
    "stands",
    "near",
    "tall",
    "tree",
    "house",
    "with",
    "light",
)
_LOUDER = 10
_MEAN_AND_STD = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def save_tiny_qwen3_vl(folder: Path, *, seed: int = 0) -> Path:
    """Save a random Qwen3-VL that captions, of 300 kB, in the layout of its releases.

    Returns:
        ``folder``, which is made if it is missing.
    """
    tokenizer = qwen2_tokenizer(_WORDS)
    tokenizer.chat_template = _template(
        "<|im_start|>{role}\n", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>\n"
    )
    model = tiny_qwen3_vl_lm(tokenizer, seed=seed)
    vision = model.config.vision_config
    settings = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 16 * 32 * 32},
        **_MEAN_AND_STD,
    }
    _save(folder, model, tokenizer, Qwen2VLImageProcessorPil(**settings))
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    write_json(folder / "video_preprocessor_config.json", {**settings, **videos})
    return folder


def _template(before: str, image: str, after: str) -> str:
    """A chat template that puts one text before and one after a message, and one in the place of an image.

    Args:
        before: may name the role of the message, as ``{role}``; that of the answer comes last.
    """
    start = before.replace("{role}", "' + message['role'] + '").replace("\n", "\\n")
    end = after.replace("\n", "\\n")
    answer = before.replace("{role}", "assistant").replace("\n", "\\n")
    return (
        f"{{% for message in messages %}}{{{{ '{start}' }}}}{{% for piece in message['content'] %}}"
        f"{{% if piece['type'] == 'image' %}}{{{{ '{image}' }}}}"
        "{% else %}{{ piece['text'] }}{% endif %}"
        f"{{% endfor %}}{{{{ '{end}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{answer}' }}}}{{% endif %}}"
    )


def _save(folder: Path, model: PreTrainedModel, tokenizer: Any, image_processor: Any) -> None:
    """Save a model that is asked as chats are, and that writes only words."""
    spoken = {token for word in _WORDS for token in tokenizer.encode(f" {word}", add_special_tokens=False)}
    generation = model.generation_config
    # As releases have them: by default they sample, which is not the same twice.
    generation.update(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.2)
    generation.eos_token_id = tokenizer.eos_token_id
    generation.suppress_tokens = sorted({*range(len(tokenizer))} - spoken - {tokenizer.eos_token_id})
    for weight in model.parameters():
        if weight.dim() > 1:
            # As they were made, one would say the same of all images.
            weight.data.mul_(_LOUDER)
    for part in (model, tokenizer, image_processor):
        part.save_pretrained(folder)
