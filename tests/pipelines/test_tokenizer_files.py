"""Tokenizers in each kind of files that released folders hold: one gives the tokens of the other."""

import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sample import CPU
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import GemmaTokenizer, LlamaTokenizer, T5Tokenizer

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, family_names, load_family, releases_of
from diffsynth_lite.pipelines.base.tokenizer import load_tokenizer
from diffsynth_lite.testing.text_encoders import tiny_gemma2, tiny_mistral3, tiny_t5, tiny_umt5
from diffsynth_lite.testing.tokenizers import MISTRAL_TEMPLATE, clip_tokenizer, qwen2_tokenizer

CORPUS = [
    "a photo of a cat that sits on the mat in front of a red door",
    "The Quick brown fox jumps over the lazy dog; x-ray 3D, 42!",
    "“curly quotes” and 中文\uff0c标点。 ﬁne café",
]
TEXTS = ["a photo of a cat", "The  Quick “fox”\uff0cﬁne", "É 猫 Door", "", " 42! "]
MARKS = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]"]


@dataclass(frozen=True)
class Kind:
    """A tokenizer of one kind, and the files in which it was kept before there was ``tokenizer.json``.

    Attributes:
        family: that uses it.
        component: folder of the tokenizer.
        tokenizer: in memory, which saves itself as ``tokenizer.json``.
        files: by name.
        added_tokens: ids of tokens that are not in ``files``.
        encoder: folder and maker of a text encoder for it, where the family's own tiny one has another.
        model: the SentencePiece model in ``files``.
        settings: in ``tokenizer_config.json``, where ``tokenizer.json`` has it too.
    """

    family: str
    component: str
    tokenizer: Any
    files: dict[str, bytes]
    added_tokens: dict[str, int] = field(default_factory=dict)
    encoder: tuple[str, Callable[[Any], torch.nn.Module]] | None = None
    model: bytes | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def trained(kind: str, **settings: Any) -> bytes:
    """A SentencePiece model of the corpus."""
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()


def of_sentencepiece(
    family: str, tokenizer_class: Any, file: str, model: bytes, encoder: Any, path: Path, **settings: Any
) -> Kind:
    (path / file).write_bytes(model)
    tokenizer = tokenizer_class.from_pretrained(path, **settings)
    component = "tokenizer_2" if family == "flux" else "tokenizer"
    encoder = (component.replace("tokenizer", "text_encoder"), encoder)
    given = {name: value for name, value in settings.items() if name == "add_bos_token"}
    return Kind(family, component, tokenizer, {file: model}, encoder=encoder, model=model, settings=given)


def t5(family: str, encoder: Any, path: Path, **settings: Any) -> Kind:
    model = trained("unigram", vocab_size=400, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **settings)
    return of_sentencepiece(family, T5Tokenizer, "spiece.model", model, encoder, path, model_max_length=512)


def gemma(path: Path) -> Kind:
    names = {
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "user_defined_symbols": "<mask>",
    }
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    rules = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    model = trained(
        "bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        **names,
        **ids,
        **rules,
    )
    return of_sentencepiece(
        "sana", GemmaTokenizer, "tokenizer.model", model, tiny_gemma2, path, add_bos_token=True,
        model_max_length=4096,
    )  # fmt: skip


def mistral(path: Path) -> Kind:
    model = trained(
        "bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=MARKS,
    )
    return of_sentencepiece(
        "flux2", LlamaTokenizer, "tokenizer.model", model, tiny_mistral3, path, add_bos_token=True,
        model_max_length=4096, pad_token="</s>", padding_side="left", chat_template=MISTRAL_TEMPLATE,
    )  # fmt: skip


def byte_pairs(family: str, component: str, tokenizer: Any) -> Kind:
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in saved["model"]["merges"])])
    vocab = saved["model"]["vocab"]
    files = {"vocab.json": json.dumps(vocab).encode(), "merges.txt": merges.encode()}
    added = {token["content"]: token["id"] for token in saved["added_tokens"]}
    return Kind(
        family, component, tokenizer, files, {name: at for name, at in added.items() if name not in vocab}
    )


KINDS: dict[str, Callable[[Path], Kind]] = {
    "T5 of LTX": lambda path: t5("ltx_video", tiny_t5, path),
    "T5 of FLUX": lambda path: t5("flux", tiny_t5, path),
    "T5 of Chroma": lambda path: t5("chroma", tiny_t5, path),
    "UMT5 of Wan": lambda path: t5("wan", tiny_umt5, path),
    "CLIP of FLUX": lambda _: byte_pairs("flux", "tokenizer", clip_tokenizer()),
    "CLIP of SDXL": lambda _: byte_pairs("sdxl", "tokenizer_2", clip_tokenizer(pad_token="!")),
    "Qwen2 of Qwen-Image": lambda _: byte_pairs("qwen_image", "tokenizer", qwen2_tokenizer()),
    "Qwen2 of Z-Image": lambda _: byte_pairs("z_image", "tokenizer", qwen2_tokenizer()),
    "Gemma of Sana": gemma,
    "Mistral of FLUX.2": mistral,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return KINDS[request.param](tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def fast(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> ModelFamily:
    """The family's tiny pipeline with this tokenizer, in ``tokenizer.json``."""
    path = tmp_path_factory.mktemp("fast")
    family_class = load_family(kind.family)
    pipeline = importlib.import_module(family_class.__module__).tiny()
    parts = pipeline.components | {kind.component: kind.tokenizer}
    if kind.encoder:
        parts[kind.encoder[0]] = kind.encoder[1](kind.tokenizer)
    type(pipeline)(**parts).save_pretrained(path)
    saved = path / kind.component
    for file in kind.files:
        (saved / file).unlink(missing_ok=True)
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    settings.pop("vocab_file", None)  # where it was made, which is still there
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (saved / "tokenizer.json").is_file()
    return family_class(PipelineFolder(path=path))


def in_files(fast: ModelFamily, kind: Kind, path: Path, layout: str) -> ModelFamily:
    """A copy of a family's folder whose tokenizer is in the files of an older layout."""
    copy = Path(shutil.copytree(fast.folder.path, path / "copy"))
    folder = copy / kind.component
    (folder / "tokenizer.json").unlink()
    for name, content in kind.files.items():
        (folder / name).write_bytes(content)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) | kind.settings
    if layout == "transformers 4":
        names = [
            name for name, value in settings.items() if name.endswith("_token") and isinstance(value, str)
        ]
        special = {name: settings.pop(name) for name in names}
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
        (folder / "added_tokens.json").write_text(json.dumps(kind.added_tokens))
        settings.pop("backend")
    else:
        settings["added_tokens_decoder"] = {
            str(at): {"content": name, "special": True} for name, at in kind.added_tokens.items()
        }
    settings_file.write_text(json.dumps(settings))
    return type(fast)(PipelineFolder(path=copy))


@pytest.mark.parametrize("layout", ["its own files", "transformers 4"])
def test_the_files_from_before_tokenizer_json_give_the_same_tokens(
    fast: ModelFamily, kind: Kind, tmp_path: Path, layout: str
) -> None:
    family = in_files(fast, kind, tmp_path, layout)
    family.check_folder()
    settings = {"padding": "max_length", "max_length": 60, "truncation": True}
    ours, theirs = (one.load_tokenizer(kind.component) for one in (family, fast))  # type: ignore[attr-defined]
    reference = SentencePieceProcessor(model_proto=kind.model) if kind.model else None
    for text in (*TEXTS, "".join([*kind.added_tokens, "x"])):
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        if reference and text == text.strip():  # Llama's own puts no second space before a text
            assert [index for index in ids if index not in ours("")["input_ids"]] == reference.encode(text)
        assert dict(ours(text, **settings)) == dict(theirs(text, **settings))
    assert family.prompt_lengths(TEXTS) == fast.prompt_lengths(TEXTS)
    (encoded,), (expected,) = (
        one.load_prompt_encoder(torch.float32, CPU)([Prompt(text=TEXTS[1])]) for one in (family, fast)
    )
    assert encoded.keys() == expected.keys()
    assert all(torch.equal(encoded[name], expected[name]) for name in encoded)


def test_every_kind_of_files_that_releases_have_is_one_of_these(tmp_path: Path) -> None:
    loaded = set()
    for name, make in KINDS.items():
        (path := tmp_path / name).mkdir()
        kind = make(path)
        loaded.add((type(kind.tokenizer).__name__, frozenset(kind.files)))
    released = {
        (tokenizer.class_name.removesuffix("Fast"), frozenset(tokenizer.files))
        for name in family_names()
        for release in releases_of(name)
        for tokenizer in release.tokenizers.values()
    }
    assert {(name, files) for name, files in released if files and "tokenizer.json" not in files} <= loaded


def test_a_lone_spiece_model_is_of_the_class_that_the_pipeline_names(tmp_path: Path) -> None:
    kind = t5("ltx_video", tiny_t5, tmp_path)
    for class_name in ("T5Tokenizer", "T5TokenizerFast"):
        tokenizer = load_tokenizer(tmp_path, class_name)
        assert tokenizer(TEXTS)["input_ids"] == kind.tokenizer(TEXTS)["input_ids"]
    with pytest.raises(UserError, match=r"neither model_index\.json nor .* names its class; files there"):
        load_tokenizer(tmp_path)


def test_characters_that_wans_tokenizer_has_no_piece_for_are_unknown_as_to_its_pipelines(
    tmp_path: Path,
) -> None:
    """SentencePiece makes bytes of them; the class of transformers 5 has that switched off."""
    kind = t5("wan", tiny_umt5, tmp_path, byte_fallback=True)
    assert kind.model
    bytes_of_one = SentencePieceProcessor(model_proto=kind.model).encode("\U0001f999")
    assert len(bytes_of_one) == 1 + 4
    (space, *_), eos, unknown = bytes_of_one, 1, 2
    assert load_tokenizer(tmp_path, "T5TokenizerFast")("\U0001f999")["input_ids"] == [space, unknown, eos]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:d60acb\nsize 791656\n"


@pytest.mark.parametrize(
    ("class_name", "files", "message"),
    [
        ("T5Tokenizer", {}, r"a T5Tokenizer, lacks tokenizer\.json or spiece\.model; files there: none"),
        (
            "T5Tokenizer",
            {"spiece.model": POINTER},
            r"spiece\.model \(73 bytes\) is not a SentencePiece model",
        ),
        ("T5Tokenizer", {"tokenizer.json": b"{"}, "Expecting property name"),
        ("T5Tokenizer", {"tokenizer.json": b"{}"}, "added_tokens"),
        ("GemmaTokenizer", {}, r"lacks tokenizer\.json or tokenizer\.model"),
        ("GemmaTokenizer", {"tokenizer.model": POINTER}, "73 bytes"),
        ("CLIPTokenizer", {}, r"lacks tokenizer\.json or vocab\.json and merges\.txt"),
        (
            "CLIPTokenizer",
            {"merges.txt": b""},
            r"lacks tokenizer\.json or vocab\.json; files there: merges\.txt",
        ),
        ("CLIPTokenizer", {"vocab.json": b"{}"}, r"json or merges\.txt; files there: vocab\.json"),
        ("Qwen2Tokenizer", {}, r"a Qwen2Tokenizer, lacks tokenizer\.json or vocab\.json and merges\.txt"),
        (None, {"tokenizer_config.json": b'{"tokenizer_class": "CLIPTokenizer"}'}, r"lacks tokenizer\.json"),
    ],
)
def test_what_is_wrong_with_a_tokenizer_is_reported_and_asks_for_no_second_download(
    class_name: str | None, files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path, class_name)
    assert str(caught.value).startswith(f"model.path: the tokenizer in {tmp_path}")
    assert str(caught.value).endswith("; the weights need no second download")


@pytest.mark.parametrize("package", ["sentencepiece", "google.protobuf.message"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spiece.model").write_bytes(trained("unigram", vocab_size=90))
    for name in [name for name in sys.modules if name.startswith("sentencepiece")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"spiece\.model is read with .* `pip install -U sentencepiece"):
        load_tokenizer(tmp_path, "T5Tokenizer")


def test_the_checks_of_a_run_load_every_tokenizer(fast: ModelFamily, kind: Kind, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(fast.folder.path, tmp_path / "copy"))
    family = type(fast)(PipelineFolder(path=copy))
    family.check_folder(with_weights=False)
    (copy / kind.component / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"the tokenizer in {copy / kind.component} cannot be loaded"):
        family.check_folder(with_weights=False)
