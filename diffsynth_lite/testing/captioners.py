"""Small random models that caption, saved in folders as the hub has them: for tests of what uses one.

They write words of their vocabulary, which depend on the images and on the instruction, and mean nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import (
    BartConfig,
    CLIPImageProcessorPil,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from diffsynth_lite.files import parse_json, write_json
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.text_encoders import tiny_gemma3, tiny_qwen3_vl_lm
from diffsynth_lite.testing.tokenizers import gemma_tokenizer, qwen2_tokenizer

_WORDS = (
    *("a", "red", "blue", "cat", "dog", "sits", "stands"),
    *("near", "tall", "tree", "house", "with", "light"),
)
_LOUDER = 10
_MEAN_AND_STD = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_WIDTH = 16


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


def save_tiny_gemma3(folder: Path, *, seed: int = 0) -> Path:
    """The same of Gemma 3, whose images are squares of 28 pixels, and one token each."""
    tokenizer = gemma_tokenizer(_WORDS)
    marks = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    _add(tokenizer, *marks.values(), "<start_of_turn>", "<end_of_turn>")
    tokenizer.chat_template = "{{ bos_token }}" + _template(
        "<start_of_turn>{role}\n", "<start_of_image>", "<end_of_turn>\n"
    )
    model = tiny_gemma3(tokenizer, seed=seed)
    for name, token in marks.items():
        setattr(model.config, f"{name}_index", tokenizer.convert_tokens_to_ids(token))
    image_processor = Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, **_MEAN_AND_STD)
    processor = {"image_seq_length": 1, "processor_class": "Gemma3Processor"}
    return _save(folder, model, tokenizer, image_processor, settings=processor, named_tokens=marks)


def save_tiny_smolvlm(folder: Path, *, seed: int = 0) -> Path:
    """The same of SmolVLM, which sees an image as tiles of 32 pixels, of four tokens each."""
    tokenizer = qwen2_tokenizer(_WORDS)
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    _add(tokenizer, "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *rows)
    tokenizer.chat_template = _template("<|im_start|>{role}:", "<image>", "<end_of_utterance>\n")
    config = SmolVLMConfig(
        text_config=_llama(tokenizer),
        vision_config={**_VISION, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    with seeded(seed):
        model = SmolVLMForConditionalGeneration(config).eval()
    image_processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, **_MEAN_AND_STD
    )
    processor = {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}
    return _save(folder, model, tokenizer, image_processor, settings=processor)


def save_tiny_joycaption(folder: Path, *, seed: int = 0) -> Path:
    """The same of JoyCaption, a LLaVA whose chat template takes texts, and puts one image in by itself."""
    tokenizer = qwen2_tokenizer(_WORDS)
    _add(tokenizer, "<image>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'user' %}{{ '<image>' }}{% endif %}{{ message['content'] | trim }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    config = LlavaConfig(
        text_config=_llama(tokenizer),
        vision_config={**_VISION, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    with seeded(seed):
        model = LlavaForConditionalGeneration(config).eval()
    image_processor = SiglipImageProcessorPil(size={"height": 32, "width": 32}, **_MEAN_AND_STD)
    processor = {
        "patch_size": 8,
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
        "processor_class": "LlavaProcessor",
    }
    return _save(folder, model, tokenizer, image_processor, settings=processor)


def save_tiny_florence2(folder: Path, *, seed: int = 0) -> Path:
    """The same of Florence-2, which has tasks and no chat template, and an encoder of its own for texts."""
    tokenizer = qwen2_tokenizer(_WORDS)
    _add(tokenizer, "<image>", "<s>", "</s>")
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = "<s>", "</s>", None
    text_config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=_WIDTH,
        **{f"{part}_{name}": number for part in ("encoder", "decoder") for name, number in _BART.items()},
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )
    config = Florence2Config(
        text_config=text_config.to_dict(),
        vision_config={
            "depths": [1, 1, 1, 1],
            "embed_dim": [8, 8, 8, _WIDTH],
            "num_heads": [1, 1, 1, 1],
            "num_groups": [1, 1, 1, 1],
            "window_size": 4,
            "projection_dim": _WIDTH,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    with seeded(seed):
        model = Florence2ForConditionalGeneration(config).eval()
    size = {"height": 64, "width": 64}
    processor = CLIPImageProcessorPil(size=size, do_center_crop=False, image_seq_length=5, **_MEAN_AND_STD)
    marks, louder = {"image_token": "<image>"}, 4 * _LOUDER
    settings = {"processor_class": "Florence2Processor"}
    return _save(folder, model, tokenizer, processor, settings=settings, named_tokens=marks, louder=louder)


def save_tiny_tagger(folder: Path, tags: Mapping[str, tuple[int, Sequence[float]]]) -> Path:
    """Save a tagger in the layout of the WD taggers, for images of 8 x 8 pixels.

    Args:
        tags: category and three weights, by name. The probability of a tag is the sigmoid of its weights
            times the mean blue, green and red of an image, in [0, 255].
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{number},{name},{category},1" for number, (name, (category, _)) in enumerate(tags.items())]
    text = "\n".join(["tag_id,name,category,count", *lines]) + "\n"
    (folder / "selected_tags.csv").write_text(text, encoding="utf-8")
    (folder / "model.onnx").write_bytes(_onnx_of([weights for _, weights in tags.values()]))
    return folder


def _onnx_of(weights: Sequence[Sequence[float]]) -> bytes:
    """The network of a tiny tagger as protocol buffers; the numbers are those of the fields in onnx.proto."""
    matrix = np.asarray(weights, dtype="<f4").T
    sizes = b"".join(_field(1, size) for size in matrix.shape)
    stored = sizes + _field(2, 1) + _field(8, "w") + _field(9, matrix.tobytes())
    axes = _field(1, "axes") + _field(8, 1) + _field(8, 2) + _field(20, 7)
    flat = _field(1, "keepdims") + _field(3, 0) + _field(20, 2)
    graph = [
        _field(1, _node("ReduceMean", ["x"], "mean") + _field(5, axes) + _field(5, flat)),
        _field(1, _node("MatMul", ["mean", "w"], "logits")),
        _field(1, _node("Sigmoid", ["logits"], "y")),
        _field(2, "tagger"),
        _field(5, stored),
        _field(11, _value("x", ["batch", 8, 8, 3])),
        _field(12, _value("y", ["batch", matrix.shape[1]])),
    ]
    return _field(1, 8) + _field(8, _field(2, 17)) + _field(7, b"".join(graph))


def _node(operator: str, inputs: Sequence[str], output: str) -> bytes:
    return b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, operator)


def _value(name: str, shape: Sequence[int | str]) -> bytes:
    sizes = b"".join(_field(1, _field(2 if isinstance(size, str) else 1, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, 1) + _field(2, sizes)))


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    encoded = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(encoded)) + encoded


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


_VISION = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_BART = {"layers": 2, "attention_heads": 2, "ffn_dim": 2 * _WIDTH}


def _llama(tokenizer: Any) -> dict[str, Any]:
    layout: dict[str, Any] = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        **{**_VISION, "num_hidden_layers": 3},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).to_dict()
    return layout


def _add(tokenizer: Any, *marks: str) -> None:
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])


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


def _save(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    image_processor: Any,
    *,
    settings: Mapping[str, Any] = _NOTHING,
    named_tokens: Mapping[str, str] = _NOTHING,
    louder: float = _LOUDER,
) -> Path:
    """Save a model that writes only words.

    Args:
        settings: its ``processor_config.json``, if it has one.
        named_tokens: tokens that the processor knows by a name.
        louder: weights are multiplied by it. As they were made, one would say the same of all images.
    """
    spoken = {token for word in _WORDS for token in tokenizer.encode(f" {word}", add_special_tokens=False)}
    generation = model.generation_config
    # As releases have them: by default they sample, which is not the same twice.
    generation.update(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.2)
    generation.eos_token_id = tokenizer.eos_token_id
    if model.config.is_encoder_decoder:
        generation.forced_eos_token_id = tokenizer.eos_token_id
    generation.suppress_tokens = sorted({*range(len(tokenizer))} - spoken - {tokenizer.eos_token_id})
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(louder)
    for part in (model, tokenizer, image_processor):
        part.save_pretrained(folder)
    if settings:
        write_json(folder / "processor_config.json", dict(settings))
    if named_tokens:
        known = parse_json((folder / "tokenizer_config.json").read_bytes())
        write_json(folder / "tokenizer_config.json", {**known, "extra_special_tokens": dict(named_tokens)})
    return folder
