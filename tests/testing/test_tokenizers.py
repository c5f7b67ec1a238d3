"""The assembled tokenizers: words are single tokens, templates have the length that diffusers cuts off."""

import pytest
from diffusers import QwenImageEditPipeline, QwenImagePipeline
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from diffsynth_lite.testing.tokenizers import (
    assemble_byte_pairs,
    clip_tokenizer,
    gemma_tokenizer,
    mistral_tokenizer,
    qwen2_tokenizer,
    t5_tokenizer,
)

WORDS = ("red", "circle", "zorb")
NO_MODELS = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))


@pytest.mark.parametrize(
    ("pipeline", "length", "end"),
    [
        (QwenImagePipeline(**NO_MODELS), 34, "{}"),
        (QwenImageEditPipeline(processor=None, **NO_MODELS), 64, "<|vision_start|>"),
    ],
    ids=["image", "edit"],
)
def test_the_template_before_the_prompt_is_as_long_as_diffusers_cuts_off(pipeline, length, end):
    prefix = pipeline.prompt_template_encode.split(end)[0]
    assert len(qwen2_tokenizer().encode(prefix)) == length == pipeline.prompt_template_encode_start_idx


def test_a_prompt_follows_the_template_without_a_token_across_the_border():
    template = QwenImagePipeline(**NO_MODELS).prompt_template_encode
    tokenizer = qwen2_tokenizer(WORDS)
    tokens = tokenizer.tokenize(template.format("red circle"))
    assert tokens[34:] == ["red", "Ġcircle", "<|im_end|>", "Ċ", "<|im_start|>", "assistant", "Ċ"]


def test_every_given_word_is_one_token_at_the_start_and_after_a_space():
    tokenizer = qwen2_tokenizer(WORDS)
    assert tokenizer.tokenize(" ".join(WORDS)) == ["red", "Ġcircle", "Ġzorb"]
    assert [len(tokenizer.tokenize(word)) for word in WORDS] == [1, 1, 1]


def test_other_text_falls_back_to_bytes_and_comes_back_whole():
    tokenizer = qwen2_tokenizer()
    text = "a crème-colored zebra, 64 px²\n→ 北京"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("word", ["", "two words", "64", "it's"])
def test_a_word_that_the_pre_tokenizer_splits_is_refused_by_name(word):
    with pytest.raises(ValueError, match="letters only") as caught:
        qwen2_tokenizer(["red", word])
    assert repr([word]) in str(caught.value)


def test_the_order_of_what_is_assembled_is_the_same_in_every_process():
    # Python hashes strings differently in each: what came out of a set would differ from run to run.
    pairs = assemble_byte_pairs(["cab", "beg", "bag"], "abceg")
    assert pairs.merges == [("c", "a"), ("ca", "b"), ("b", "e"), ("be", "g"), ("b", "a"), ("ba", "g")]
    assert list(pairs.vocab) == [*"abceg", *("".join(pair) for pair in pairs.merges)]


def test_saving_and_loading_changes_nothing(tmp_path):
    tokenizer = qwen2_tokenizer(WORDS)
    tokenizer.save_pretrained(tmp_path)
    loaded = Qwen2Tokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (loaded.pad_token, loaded.eos_token) == ("<|endoftext|>", "<|im_end|>")
    for content in ("a red zorb", [{"type": "text", "text": "a red zorb"}]):
        conversation = [{"role": "user", "content": content}]
        rendered = loaded.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert rendered == "<|im_start|>user\na red zorb<|im_end|>\n<|im_start|>assistant\n"


@given(st.lists(st.text("abc", min_size=1, max_size=8), max_size=12))
def test_assembled_pairs_make_every_piece_one_token_in_the_library_itself(pieces):
    pairs = assemble_byte_pairs(pieces, "abc")
    tokenizer = Tokenizer(BPE(vocab=pairs.vocab, merges=pairs.merges))
    assert [tokenizer.encode(piece).tokens for piece in pieces] == [[piece] for piece in pieces]


def test_a_t5_tokenizer_has_words_and_falls_back_to_characters(tmp_path):
    tokenizer = t5_tokenizer(WORDS)
    assert tokenizer.tokenize("red circle ab") == ["\u2581red", "\u2581circle", "\u2581", "a", "b"]
    assert tokenizer("red").input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id == 0
    tokenizer.save_pretrained(tmp_path)
    text = "a red circle, zorb? ~!"
    assert T5Tokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in tokenizer(text).input_ids


def test_a_clip_tokenizer_spells_words_out_and_cuts_at_the_length_of_the_real_one(tmp_path):
    tokenizer = clip_tokenizer()
    assert tokenizer.tokenize("Red ab") == ["r", "e", "d</w>", "a", "b</w>"]
    tokens = tokenizer("a crème-colored zebra, 64 px²").input_ids
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.unk_token_id not in tokens[1:-1]
    assert tokenizer.eos_token_id == len(tokenizer) - 1
    assert len(tokenizer("circle " * 50, truncation=True).input_ids) == 77
    tokenizer.save_pretrained(tmp_path)
    assert CLIPTokenizer.from_pretrained(tmp_path)("a red circle").input_ids == (
        tokenizer("a red circle").input_ids
    )


def test_a_gemma_tokenizer_has_words_and_falls_back_to_characters_and_bytes(tmp_path):
    tokenizer = gemma_tokenizer(WORDS)
    text = "red circle ab\n\u00e9"
    tokens = ["red", "\u2581circle", "\u2581", "a", "b", "<0x0A>", "<0xC3>", "<0xA9>"]
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer(text).input_ids[0] == tokenizer.bos_token_id
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 2)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


def test_a_mistral_tokenizer_spells_bytes_out_and_fills_up_on_the_left(tmp_path):
    tokenizer = mistral_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "a crème-colored zebra, 64 px²"
    chats = [[{"role": "user", "content": [{"type": "text", "text": part}]}] for part in (text, "a")]
    for reader in (tokenizer, loaded):
        long, short = reader.apply_chat_template(chats, padding=True)["input_ids"]
        assert len(long) == len(short) == len(text.encode()) + 3
        assert reader.decode(long) == f"<s>[INST]{text}[/INST]"
        assert reader.decode(short).removeprefix("<pad>" * (len(long) - 4)) == "<s>[INST]a[/INST]"
