"""This file loads a tokenizer from files of any kind, and reports what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.model_settings import shortened

_WHOLE = "tokenizer.json"
# transformers also takes this name for classes that have another one for their SentencePiece model.
_SENTENCEPIECE = "tokenizer.model"


def load_tokenizer(folder: Path, class_name: str | None = None) -> Any:
    """A tokenizer of transformers, as diffusers loads it with a pipeline; nothing is downloaded.

    Args:
        folder: has a ``tokenizer.json``, or what stood in its place before: a SentencePiece model
            (``spiece.model``, ``tokenizer.model``), or ``vocab.json`` and ``merges.txt``.
        class_name: the class that ``model_index.json`` names; None where it names none.
    """
    tokenizer_class = _class_of(folder, class_name)
    if tokenizer_class is not AutoTokenizer:
        _require_files(folder, tokenizer_class)
    try:
        # Unless it is False, transformers asks for consent at the terminal.
        tokenizer = tokenizer_class.from_pretrained(folder, trust_remote_code=False)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            # Its warning of a long text has no use: captions are counted uncut, and cut to be encoded.
            tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
            tokenizer("a")  # some of its settings are first read then
    except Exception as error:  # tokenizers has no class of errors of its own
        reason = _what_is_wrong(folder, tokenizer_class) or shortened(error)
        raise UserError(
            f"model.path: the tokenizer in {folder} cannot be loaded: {reason}; {_files(folder)}"
        ) from error
    _require_files(folder, type(tokenizer))
    return tokenizer


def _class_of(folder: Path, class_name: str | None) -> Any:
    """The class that diffusers loads; AutoTokenizer, which goes by the folder, where that is a processor."""
    named = getattr(transformers, class_name or "", None)
    if is_misread(folder, class_name):
        return PreTrainedTokenizerFast
    is_tokenizer = isinstance(named, type) and issubclass(named, PreTrainedTokenizerBase)
    # AutoTokenizer also refuses code that comes with the folder, where a named class would pass over it.
    return named if is_tokenizer and "auto_map" not in _settings(folder) else AutoTokenizer


def is_misread(folder: Path, class_name: str | None) -> bool:
    """Whether the class that ``model_index.json`` names gives other tokens than ``tokenizer.json``.

    transformers 5.23 builds ``LlamaTokenizer`` again, which splits words as Llama 2 did
    (huggingface/transformers pull 45345 mended only ``AutoTokenizer``). HunyuanVideo has Llama 3's by that
    name, which splits words into bytes.
    """
    file = folder / _WHOLE
    if getattr(transformers, class_name or "", None) is not LlamaTokenizer or not file.is_file():
        return False
    try:
        return "ByteLevel" in json.dumps(json.loads(file.read_bytes())["pre_tokenizer"])
    except (ValueError, KeyError, TypeError):
        return False  # loading it reports the error


def _settings(folder: Path) -> str:
    path = folder / "tokenizer_config.json"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _require_files(folder: Path, tokenizer_class: type[PreTrainedTokenizerBase]) -> None:
    """Check that the files of a class are there, or one that holds the whole vocabulary.

    Without them, some classes make up a vocabulary of a few special tokens. Those of bytes need none.
    """
    names = dict(tokenizer_class.vocab_files_names)
    if not names:
        return
    whole = names.pop("tokenizer_file", _WHOLE)
    parts = list(names.values()) or [_SENTENCEPIECE]
    missing = [name for name in parts if not (folder / name).is_file()]
    if missing and not any((folder / name).is_file() for name in (whole, _SENTENCEPIECE)):
        raise UserError(
            f"model.path: the tokenizer in {folder}, a {tokenizer_class.__name__}, lacks {whole} or "
            f"{' and '.join(missing)}; {_files(folder)}"
        )


def _what_is_wrong(folder: Path, tokenizer_class: Any) -> str:
    """What is wrong with a folder without ``tokenizer.json``; empty where transformers reports it.

    It tries one format after another, and asks for the package of the last.
    """
    if (folder / _WHOLE).is_file():
        return ""
    for model in sorted(folder.glob("*.model")):
        if not _is_sentencepiece(model):
            return f"{model.name} ({model.stat().st_size} bytes) is not a SentencePiece model"
    if tokenizer_class is AutoTokenizer and "tokenizer_class" not in _settings(folder):
        return "neither model_index.json nor tokenizer_config.json names its class"
    return ""


def _is_sentencepiece(path: Path) -> bool:
    try:
        # Here, as transformers does it: with versions that do not fit it raises an error of protobuf's own.
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except Exception as error:
        raise UserError(
            f"model.path: {path} is read with the packages sentencepiece and protobuf, which cannot be "
            f"imported ({' '.join(str(error).split())}): `pip install -U sentencepiece protobuf`"
        ) from error
    try:
        return bool(ModelProto.FromString(path.read_bytes()).pieces)
    except DecodeError:
        return False


def _files(folder: Path) -> str:
    there = sorted(path.name for path in folder.glob("*") if path.is_file())
    return f"files there: {', '.join(there) or 'none'}; the weights need no second download"
