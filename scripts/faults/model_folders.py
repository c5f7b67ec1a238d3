"""S5: model folders whose files are damaged or hostile, one at a time, before the start of a real run."""

import json
import logging
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy
from poison import poisons
from safetensors.numpy import load_file, save_file

from faults.bench import PLAIN, Bench, Run, end, fault, forked, limit_memory, waited

Outcome = Literal["refused", "accepted", "traceback", "no answer"]

SETTINGS = (*PLAIN, "train.steps=1", "train.lr_scheduler=constant", "data.num_workers=0")
LIMIT_S = 20.0
MEMORY_BYTES = 2 << 30
"""That a start may take next to what the process has: to build what a hostile size asks for takes more."""
MAX_LINES = 3
"""Of an answer: a wrong size may show in more than one check."""
DEPTH = 100_000
NAN = float("nan")
VALUES: tuple[Any, ...] = (None, "x", [], {}, -1, 0, 10**12, NAN, "x" * 100_000)
"""That each field has in turn."""
_ERROR = "logged as an error: "
_COPIED = ("tokenizer.json",)
"""Files whose fields are vocabularies: these are damaged as a whole only."""
_COMPUTES = re.compile(r"encoding \d+ |Loading the transformer")
"""Logged before the first caption and the first step: some settings make a model that its files fit and that
cannot compute, which these then show."""
_OPTIONAL = ("generation_config.json", "tokenizer_config.json")
"""Files that transformers does without: nothing is generated, and the vocabulary's file holds all of it."""
_INDEX = "diffusion_pytorch_model.safetensors.index.json"


@dataclass(frozen=True)
class Attack:
    """A way to damage a model folder.

    Attributes:
        file: what is damaged, in the folder.
        what: is done to it.
        spoil: does it, given the path of the file.
        is_harmless: whether a run may continue as if nothing were; else it has to end in a line.
    """

    file: str
    what: str
    spoil: Callable[[Path], object]
    is_harmless: bool = False


@fault("S5", "refused with a line, or possible; nothing executed, no memory taken for what a size says")
def attack_folders(bench: Bench) -> str:
    """Model folders damaged or hostile: each file, each setting, headers, tensors, indices."""
    marker = bench.root / "planted code ran"
    counts: Counter[Outcome] = Counter()
    for name, run in {"qwen_image": bench.images(), "wan": bench.experts(), "sdxl": bench.unet()}.items():
        run.finish(run.folder, *SETTINGS)
        attacks = list(attacks_on(run.model, marker))
        for attack in attacks[bench.seed % 7 :: bench.pick(149, 29, 1)]:
            outcome, text = start_of(run, attack)
            allowed = {"refused", "accepted"} if attack.is_harmless else {"refused"}
            if attack.file.endswith("config.json") and _COMPUTES.search(text):
                allowed.add("traceback")
            assert outcome in allowed, f"{name}, {attack.file}, {attack.what}: {outcome}\n{text}"
            assert not marker.exists(), f"{name}, {attack.file}, {attack.what}"
            counts[outcome] += 1
    return (
        f"{sum(counts.values())} attacks on 3 pipelines: {counts['refused']} refused, {counts['accepted']} "
        f"taken, as of no use or possible; {counts['traceback']} by a traceback when the model computes"
    )


def start_of(run: Run, attack: Attack) -> tuple[Outcome, str]:
    """What the training command makes of a pipeline that was attacked, and what it prints.

    It is started in a child of this process, which has little memory.
    """
    model = run.root / "attacked"
    for folder in (model, run.folder):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run.model, model, symlinks=True)
    attack.spoil(model / attack.file)
    run.log.unlink(missing_ok=True)

    def start() -> int:
        limit_memory(MEMORY_BYTES)
        handler = logging.StreamHandler()
        handler.setLevel(logging.ERROR)
        handler.setFormatter(logging.Formatter(f"{_ERROR}%(message)s"))
        logging.getLogger("diffsynth_lite").addHandler(handler)
        return run.exit_code(run.folder, *SETTINGS, f"model.path={model}")

    code = waited(child := forked(start, run.log), LIMIT_S)
    text = run.log.read_text(errors="replace")
    if code is None:
        end(child)
        return "no answer", text
    if code == 0:
        return "accepted", text
    is_one_line = code == 2 and "Traceback" not in text and 0 < text.count(_ERROR) <= MAX_LINES
    return ("refused" if is_one_line else "traceback"), text


def attacks_on(model: Path, marker: Path) -> Iterator[Attack]:
    """All attacks on a pipeline that is whole."""
    for path in sorted(model.rglob("*")):
        file = str(path.relative_to(model))
        if path.suffix == ".json":
            yield from _on_settings(file, json.loads(path.read_text()), marker)
        elif path.suffix == ".safetensors":
            yield from _on_weights(file, marker)
    denoiser = "unet" if (model / "unet").is_dir() else "transformer"
    yield from _on_index(f"{denoiser}/diffusion_pytorch_model.safetensors")


def _on_any_file(file: str, marker: Path) -> Iterator[Attack]:
    """What may be in the place of a file.

    Args:
        marker: the folder that pickles make where they run.
    """
    replaced = partial(Attack, file)
    yield replaced("missing", Path.unlink)
    yield replaced("empty", partial(_write, content=b""))
    yield replaced("cut", lambda path: _write(path, path.read_bytes()[: path.stat().st_size // 2]))
    yield replaced("a folder", lambda path: (path.unlink(), path.mkdir()))
    yield replaced("a dangling link", lambda path: (path.unlink(), path.symlink_to("nowhere")))
    yield replaced("a named pipe", lambda path: (path.unlink(), os.mkfifo(path)))
    yield replaced("a link to an endless file", lambda path: (path.unlink(), path.symlink_to("/dev/zero")))
    for form, content in poisons(marker).items():
        yield replaced(form, partial(_write, content=content))


def _on_settings(file: str, document: dict[str, Any], marker: Path) -> Iterator[Attack]:
    for attack in _on_any_file(file, marker):
        yield replace(attack, is_harmless=attack.what == "missing" and Path(file).name in _OPTIONAL)
    written = partial(Attack, file)
    yield written("not UTF-8", lambda path: _write(path, path.read_bytes().replace(b'": "', b'": "\xff')))
    yield written("nested deep", partial(_write, content=b'{"a":' * DEPTH + b"1" + b"}" * DEPTH))
    for value in ([], [1], "x", 1, None):
        content = json.dumps(value).encode()
        yield written(f"{value!r} as a whole", partial(_write, content=content))
    if Path(file).name in _COPIED:
        return
    content = json.dumps(document).encode()
    deep = content[:-1] + b',"a":' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    yield written("a field nested deep", partial(_write, content=deep))
    yield written("all twice", partial(_write, content=content[:-1] + b"," + content[1:]), is_harmless=True)
    for place, value in _places(document):
        name = ".".join(place)
        for other in VALUES:
            if type(other) is type(value) and other == value:
                continue
            spoiled = json.dumps(_with(document, place, other)).encode()
            yield written(
                f"{name}: {json.dumps(other)[:20]}", partial(_write, content=spoiled), is_harmless=True
            )
    for hostile in (
        {
            "auto_map": {
                "AutoModel": "planted.P",
                "AutoConfig": "planted.P",
                "AutoTokenizer": ["planted.P", None],
            }
        },
        {"trust_remote_code": True},
        {"_name_or_path": "../../../etc/passwd"},
        *(
            {"_class_name": name}
            for name in ("dict", "os.system", "QwenImagePipeline", "AutoencoderKL", ["os", "system"])
        ),
    ):
        spoiled = json.dumps({**document, **hostile}).encode()
        yield written(f"{hostile}", partial(_planted, content=spoiled, marker=marker), is_harmless=True)


def _places(document: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each field, also inside others, and its value."""
    for name, value in document.items():
        yield (name,), value
        if isinstance(value, dict):
            yield from (((name, *place), inner) for place, inner in _places(value))


def _with(document: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = place
    return {**document, first: _with(document[first], tuple(rest), value) if rest else value}


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _planted(path: Path, content: bytes, marker: Path) -> None:
    path.write_bytes(content)
    for folder in (path.parent, path.parent.parent):
        (folder / "planted.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass P: ...\n")


def _on_weights(file: str, marker: Path) -> Iterator[Attack]:
    yield from _on_any_file(file, marker)
    yield Attack(file, "a pickle of another name", partial(_renamed_pickle, marker=marker))
    for what, change in _HEADERS.items():
        yield Attack(file, f"header: {what}", partial(_change_header, change=change))
    for what, change in _TENSORS.items():
        is_harmless = what in ("one too many", "one of another dtype")
        yield Attack(file, f"tensors: {what}", partial(_change_tensors, change=change), is_harmless)


def _renamed_pickle(path: Path, marker: Path) -> None:
    path.unlink()
    path.with_suffix(".bin").write_bytes(poisons(marker)["pickle"])


Header = dict[str, Any]


def _header_of(content: bytes) -> tuple[Header, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _change_header(path: Path, change: Callable[[Header, bytes], bytes]) -> None:
    _write(path, change(*_header_of(path.read_bytes())))


def _encoded(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _first_entry(header: Header) -> str:
    return next(name for name in header if name != "__metadata__")


def _entry(**changes: Any) -> Callable[[Header, bytes], bytes]:
    def change(header: Header, data: bytes) -> bytes:
        first = _first_entry(header)
        return _encoded({**header, first: {**header[first], **changes}}, data)

    return change


_HEADERS: dict[str, Callable[[Header, bytes], bytes]] = {
    "longer than the file": lambda header, data: _encoded(header, data, length=1 << 40),
    "as long as can be": lambda header, data: _encoded(header, data, length=(1 << 64) - 1),
    "of length 0": lambda header, data: _encoded(header, data, length=0),
    "not JSON": lambda header, data: _encoded(json.dumps(header).encode()[:-5], data),
    "a list": lambda header, data: _encoded(b"[]", data),
    "nested deep": lambda header, data: _encoded(b'{"a":' * DEPTH + b"1" + b"}" * DEPTH, data),
    "overlapping": _entry(data_offsets=[0, 8]),
    "beyond the end": _entry(data_offsets=[1 << 40, 1 << 41]),
    "backwards": _entry(data_offsets=[8, 0]),
    "a dtype that is none": _entry(dtype="F7"),
    "another dtype": _entry(dtype="F64"),
    "a shape that is huge": _entry(shape=[1 << 40, 1 << 40]),
    "a shape below 0": _entry(shape=[-1]),
    "metadata that are numbers": lambda header, data: _encoded({**header, "__metadata__": {"a": 1}}, data),
}

Tensors = dict[str, Any]


def _change_tensors(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(path)), path)


def _of_first(change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    def changed(tensors: Tensors) -> Tensors:
        first = min(name for name, tensor in tensors.items() if tensor.ndim > 1)
        return {**tensors, first: numpy.ascontiguousarray(change(tensors[first]))}

    return changed


def _with_number(tensor: Any, number: float) -> Any:
    changed = tensor.copy()
    changed.flat[-1] = number
    return changed


_TENSORS: dict[str, Callable[[Tensors], Tensors]] = {
    "none": lambda tensors: {},
    "one missing": lambda tensors: {name: tensors[name] for name in sorted(tensors)[1:]},
    "one too many": lambda tensors: {**tensors, "extra.weight": numpy.ones(3)},
    "other names": lambda tensors: {f"x.{name}": tensor for name, tensor in tensors.items()},
    "one of another shape": _of_first(lambda tensor: tensor[:1]),
    "one without an axis": _of_first(lambda tensor: tensor.flat[0]),
    "one of another dtype": _of_first(lambda tensor: tensor.astype("float64")),
    "one of whole numbers": _of_first(lambda tensor: tensor.astype("int64")),
    "one of truth values": _of_first(lambda tensor: tensor > 0),
    "a NaN": _of_first(lambda tensor: _with_number(tensor, NAN)),
    "an infinity": _of_first(lambda tensor: _with_number(tensor, float("inf"))),
}


def _on_index(file: str) -> Iterator[Attack]:
    """The same weights in two shards, and what their index may say."""
    whole = _sharded(lambda weight_map: {"metadata": {}, "weight_map": weight_map})
    yield Attack(file, "in shards", whole, is_harmless=True)
    for what, change in _INDICES.items():
        yield Attack(file, f"index: {what}", _sharded(change), is_harmless=what == "without metadata")


def _sharded(index: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        tensors = load_file(path)
        path.unlink()
        names = sorted(tensors)
        halves = {"first": names[: len(names) // 2], "second": names[len(names) // 2 :]}
        weight_map = {}
        for place, half in enumerate(halves.values(), 1):
            shard = path.with_name(f"diffusion_pytorch_model-{place:05}-of-00002.safetensors")
            save_file({name: tensors[name] for name in half}, shard)
            weight_map |= dict.fromkeys(half, shard.name)
        (path.parent / _INDEX).write_text(json.dumps(index(weight_map)))

    return spoil


def _with_map(value: Any) -> Callable[[dict[str, str]], Any]:
    return lambda weight_map: {"metadata": {}, "weight_map": value}


def _with_files(change: Callable[[str], Any]) -> Callable[[dict[str, str]], Any]:
    """Another file for the first of the tensors."""

    def changed(weight_map: dict[str, str]) -> Any:
        first = min(weight_map)
        return {"metadata": {}, "weight_map": {**weight_map, first: change(weight_map[first])}}

    return changed


_INDICES: dict[str, Callable[[dict[str, str]], Any]] = {
    "a list": lambda weight_map: [],
    "a text": lambda weight_map: "x",
    "without weight_map": lambda weight_map: {"metadata": {}},
    "without metadata": lambda weight_map: {"weight_map": weight_map},
    "weight_map a list": _with_map([]),
    "weight_map a text": _with_map("x"),
    "weight_map null": _with_map(None),
    "weight_map empty": _with_map({}),
    "a file that is a number": _with_files(lambda name: 1),
    "a file that is a list": _with_files(lambda name: [name]),
    "a file above": _with_files(lambda name: "../../secret.safetensors"),
    "an absolute file": _with_files(lambda name: "/etc/passwd.safetensors"),
    "a file that is missing": _with_files(lambda name: "diffusion_pytorch_model-00003-of-00002.safetensors"),
    "a file of the other shard": _with_files(lambda name: name.replace("00001-of", "00002-of")),
    "a file that is not a weights": _with_files(lambda name: "config.json"),
    "a name that is long": _with_files(lambda name: "x" * 100_000),
    "a tensor too many": lambda weight_map: {
        "metadata": {},
        "weight_map": {**weight_map, "extra.weight": next(iter(weight_map.values()))},
    },
}
