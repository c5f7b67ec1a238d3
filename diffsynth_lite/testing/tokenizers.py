"""Tokenizers assembled from a word list: no download, no training, the same on every machine.

``tokenizers.BpeTrainer`` is not used: with an end-of-word suffix it gives another vocabulary in each call.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from diffusers import QwenImageEditPipeline, QwenImagePipeline
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPTokenizer,
    GemmaTokenizer,
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    T5Tokenizer,
)

QWEN2_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# The text of a message is a text, or as in the releases that see images a list of pieces, as it is below.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for piece in message['content'] %}{{ piece['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set tag = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
    "{{ '[' + tag + ']' }}"
    "{% for piece in message['content'] %}{{ piece['text'] }}{% endfor %}"
    "{{ '[/' + tag + ']' }}"
    "{% endfor %}"
)


@dataclass(kw_only=True)
class BytePairs:
    """The two tables of a byte-pair encoding; a merge applies before all that follow it in the list."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]] = field(default_factory=list)


def assemble_byte_pairs(pieces: Iterable[str], alphabet: Iterable[str]) -> BytePairs:
    """Byte pairs in which every piece is one token.

    A piece is merged with the pairs known so far; where none applies, its leftmost pair is learned. A
    learned pair ranks after all earlier ones, so whatever was one token before stays one.

    Args:
        pieces: what the pre-tokenizer makes of the words; characters of the alphabet only.
        alphabet: the single-character tokens, in the order of their ids.
    """
    pairs = BytePairs(vocab={character: index for index, character in enumerate(alphabet)})
    ranks: dict[tuple[str, str], int] = {}
    for piece in pieces:
        symbols = list(piece)
        while len(symbols) > 1:
            neighbours = list(pairwise(symbols))
            known = [(ranks[pair], position) for position, pair in enumerate(neighbours) if pair in ranks]
            position = min(known)[1] if known else 0
            pair = neighbours[position]
            if pair not in ranks:
                ranks[pair] = len(ranks)
                pairs.merges.append(pair)
                pairs.vocab.setdefault(pair[0] + pair[1], len(pairs.vocab))
            symbols[position : position + 2] = [pair[0] + pair[1]]
    return pairs


def qwen2_tokenizer(words: Sequence[str] = (), *, template_texts: Sequence[str] = ()) -> Qwen2Tokenizer:
    """A Qwen2 tokenizer with a vocabulary of some 700 entries, enough for the Qwen-Image pipelines.

    The pipelines cut their prompt template off by a fixed number of tokens (34, and 64 for edits), so each
    word of the templates is one token here as it is in the real vocabulary. Other text falls back to bytes.

    Args:
        words: further words that become one token each, both at the start of a text and after a space.
        template_texts: of the prompt templates of other pipelines; their words become one token each, too.

    Raises:
        ValueError: the pre-tokenizer splits a word (digits, spaces, punctuation inside it).
    """
    alphabet = sorted(ByteLevel.alphabet())
    bare = _bare_qwen2(alphabet)

    def split(text: str) -> list[str]:
        return [piece for piece, _ in bare.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    divided = [word for word in words if len(split(word)) != 1]
    if divided:
        raise ValueError(f"words {divided} cannot be one token each: give words of letters only")
    texts = [*_qwen_image_template_texts(), *template_texts, *words, *(f" {word}" for word in words)]
    pairs = assemble_byte_pairs((piece for text in texts for piece in split(text)), alphabet)
    tokenizer = Qwen2Tokenizer(
        vocab=pairs.vocab,
        merges=pairs.merges,
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in QWEN2_SPECIAL_TOKENS])
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def _bare_qwen2(alphabet: Sequence[str]) -> Qwen2Tokenizer:
    return Qwen2Tokenizer(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])


def qwen3_vl_processor(tokenizer: Qwen2Tokenizer, *, patch_size: int = 16) -> PaddleOCRVLProcessor:
    """Does with texts and images what ``Qwen3VLProcessor`` does, whose class needs torchvision.

    Args:
        patch_size: in pixels; with 14 it is that of Qwen2.5-VL.
    """
    tokenizer._set_model_specific_special_tokens({"image_token": "<|image_pad|>"})
    images = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        size={
            "shortest_edge": 32 * 32,
            "longest_edge": 4096 * 4096,
        },  # smaller ones than the released model's
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=tokenizer.chat_template)


def t5_tokenizer(words: Sequence[str] = ()) -> T5Tokenizer:
    """A T5 tokenizer of some 100 entries, enough for the pipelines with a T5 or UMT5 encoder.

    Args:
        words: words that become one token each; other printable ASCII falls back to characters.
    """
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -5.0)]
    pieces += [(f"\u2581{word}", -3.0) for word in dict.fromkeys(words)]
    pieces += [(chr(code), -8.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def clip_tokenizer(*, pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """A CLIP tokenizer of some 500 entries, enough for the pipelines with a CLIP encoder.

    Each byte is a token, and another one where it ends a word; the last id ends a text, as in the real one.

    Args:
        pad_token: fills a text up; the second tokenizer of SDXL has ``!``.
    """
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        pad_token=pad_token,
        model_max_length=77,
    )


def gemma_tokenizer(words: Sequence[str] = ()) -> GemmaTokenizer:
    """A Gemma tokenizer, enough for the pipelines with a Gemma encoder.

    Args:
        words: words of printable ASCII that become one token each, both at the start of a text and after a
            space; other printable ASCII falls back to characters, and the rest to bytes.
    """
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    single_bytes = (f"<0x{byte:02X}>" for byte in range(256))
    characters = (chr(code) for code in range(ord("!"), ord("~") + 1))
    pieces = (piece for word in dict.fromkeys(words) for piece in (word, f"\u2581{word}"))
    pairs = assemble_byte_pairs(pieces, (*special, *single_bytes, *characters, "\u2581"))
    return GemmaTokenizer(vocab=pairs.vocab, merges=pairs.merges, add_bos_token=True, model_max_length=4096)


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of some 260 entries, enough for the pipelines with a Mistral 3 encoder.

    Each byte is a token; short texts are filled up on the left, as by the real one.
    """
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=4096,
    )
    marks = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer


def llama3_tokenizer(template_texts: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of some 400 entries, enough for the pipelines with a Llama 3 encoder.

    Bytes are tokens, and so are the words of templates, whose tokens pipelines count. Texts are split as by
    Llama 3's, but for numbers of several digits. Short ones are filled up on the right, as by HunyuanVideo's.

    Args:
        template_texts: whose words become one token each.
    """
    alphabet = sorted(ByteLevel.alphabet())
    split = _bare_qwen2(alphabet).backend_tokenizer.pre_tokenizer
    marked = r"<\|\w+\|>|<image>|\{\}"
    plain = [part for text in template_texts for part in re.split(marked, text) if part]
    pieces = (piece for text in plain for piece, _ in split.pre_tokenize_str(text))
    pairs = assemble_byte_pairs(pieces, alphabet)
    backend = Tokenizer(BPE(vocab=pairs.vocab, merges=pairs.merges))
    backend.pre_tokenizer = split
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<pad>",
        padding_side="right",
        model_max_length=8192,
    )
    marks = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def _qwen_image_template_texts() -> list[str]:
    """The stretches of plain text between special tokens and the prompt in diffusers' own templates."""
    nothing = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    pipelines = (QwenImagePipeline(**nothing), QwenImageEditPipeline(processor=None, **nothing))
    templates = (pipeline.prompt_template_encode for pipeline in pipelines)
    return [text for template in templates for text in re.split(r"<\|\w+\|>|\{\}", template) if text]
