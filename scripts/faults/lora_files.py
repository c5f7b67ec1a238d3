"""S6: LoRA files that are damaged or hostile, as a run starts from them and as they are converted."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main
from faults.bench import Bench, fault, train
from faults.model_folders import DEPTH, NAN, SETTINGS, VALUES, Attack, Outcome, answer, on_any_file, on_header

_FILE, _CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_KEY = "lora_adapter_metadata"
_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["to_q"]}
"""Next to a file: where it is there, the file's own settings are left out."""
_HOSTILE: dict[str, Any] = {
    "use_dora": True,
    "peft_type": "LOHA",
    "init_lora_weights": "pissa",
    "layer_replication": [[0, 1], [0, 1]],
    "alora_invocation_tokens": [1],
    "target_parameters": ["x"],
    "trainable_token_indices": [0],
    "use_qalora": True,
    "use_bdlora": {"a": 1},
}
"""Settings of peft by which a file is not a plain LoRA."""
_OF_THE_MODEL = ("another width",)
"""What only who has a model can tell."""
_IDLE: dict[str, Any] = {
    "fan_in_fan_out": True,
    "modules_to_save": ["x"],
    "bias": "all",
    "rank_pattern": {"to_q": 8},
    "auto_mapping": {"base_model_class": "os.system", "parent_library": "os"},
    "base_model_name_or_path": "../../../etc/passwd",
}
"""Settings of peft that change nothing of what the file's matrices do to these layers."""


@fault("S6", "refused with a line, or without effect; nothing executed")
def attack_lora_files(bench: Bench) -> str:
    """LoRA files damaged or hostile: file, header, tensors, settings in them and next to them."""
    run = bench.images()
    assert train(run, run.root / "whole", *SETTINGS) == 0
    marker = bench.root / "planted code ran"
    counts: Counter[Outcome] = Counter()
    for attack in list(attacks_on(marker))[bench.seed % 7 :: bench.pick(29, 5, 1)]:
        for reader in (_start_from, _convert):
            outcome, text = read_by(reader, run, attack)
            is_fine = attack.is_harmless or (reader is _convert and attack.what in _OF_THE_MODEL)
            allowed = {"refused", "accepted"} if is_fine else {"refused"}
            assert outcome in allowed, f"{attack.file}, {attack.what}, {reader.__name__}: {outcome}\n{text}"
            assert not marker.exists(), f"{attack.file}, {attack.what}"
            counts[outcome] += 1
    return (
        f"{sum(counts.values())} attacks, half of them by convert: {counts['refused']} refused, "
        f"{counts['accepted']} without effect"
    )


Reader = Callable[[TinyRun, Path], int]


def read_by(reader: Reader, run: TinyRun, attack: Attack) -> tuple[Outcome, str]:
    """What a command makes of the run's LoRA after an attack on it, and what it prints."""
    folder = run.root / "theirs"
    for name in ("theirs", "run"):
        shutil.rmtree(run.root / name, ignore_errors=True)
    folder.mkdir()
    (run.root / "converted.safetensors").unlink(missing_ok=True)
    shutil.copy(run.root / "whole" / "lora" / "pytorch_lora_weights.safetensors", folder / _FILE)
    if attack.file == _CONFIG_FILE:
        save_file(load_file(folder / _FILE), folder / _FILE)
        (folder / _CONFIG_FILE).write_text(json.dumps(_CONFIG))
    attack.spoil(folder / attack.file)
    return answer(partial(reader, run, folder), run.root / "log")


def _start_from(run: TinyRun, folder: Path) -> int:
    return train(run, run.root / "run", *SETTINGS, f"lora.init_from={folder / _FILE}")


def _convert(run: TinyRun, folder: Path) -> int:
    target = run.root / "converted.safetensors"
    return main(["convert", str(folder / _FILE), str(target), "--to", "diffusers", "--family", "qwen_image"])


def attacks_on(marker: Path) -> Iterator[Attack]:
    """All attacks on a LoRA file, and on peft's settings in and next to it."""
    yield from on_any_file(_FILE, marker)
    yield from on_header(_FILE)
    for what, change in _TENSORS.items():
        yield Attack(_FILE, what, partial(_rewrite, change=change))
    deep = "[" * DEPTH + "]" * DEPTH
    for text in ("", "x", "[]", "1", "null", deep, '{"transformer": 1}', '{"transformer.r": [}'):
        is_harmless = text in ("null", '{"transformer": 1}')
        yield Attack(_FILE, f"metadata: {text[:20]}", partial(_set_metadata, text=text), is_harmless)
    for attack in on_any_file(_CONFIG_FILE, marker):
        yield Attack(_CONFIG_FILE, attack.what, attack.spoil, is_harmless=attack.what == "missing")
    yield Attack(_CONFIG_FILE, "nested deep", lambda path: path.write_text(f'{{"a": {deep}}}'))
    for name, value in _settings():
        is_harmless = name in _IDLE or name not in _HOSTILE
        shown = f"{name}: {json.dumps(value)[:20]}"
        yield Attack(_FILE, shown, partial(_set_in_file, name=name, value=value), is_harmless)
        yield Attack(_CONFIG_FILE, shown, partial(_set_next_to, name=name, value=value), is_harmless)


def _settings() -> Iterator[tuple[str, Any]]:
    yield from _HOSTILE.items()
    yield from _IDLE.items()
    for name in ("r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "target_modules"):
        yield from ((name, value) for value in VALUES)
    yield "alpha_pattern", {"to_q": "x"}
    yield "alpha_pattern", {"(": 1}


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    save_file(change(load_file(path)), path, metadata=metadata)


def _set_metadata(path: Path, text: str) -> None:
    save_file(load_file(path), path, metadata={_KEY: text})


def _set_in_file(path: Path, name: str, value: Any) -> None:
    with safe_open(path, "np") as opened:
        known = json.loads(opened.metadata()[_KEY])
    _set_metadata(path, json.dumps({**known, f"transformer.{name}": value}))


def _set_next_to(path: Path, name: str, value: Any) -> None:
    path.write_text(json.dumps({**_CONFIG, name: value}))


def _of_first(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(tensors: dict[str, Any]) -> dict[str, Any]:
        first = min(tensors)
        return {**tensors, first: numpy.ascontiguousarray(change(tensors[first]))}

    return changed


def _next_to_first(ending: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """One more tensor of the first layer."""
    return lambda tensors: {**tensors, min(tensors).replace(".lora_A.weight", ending): value}


_TENSORS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no tensors": lambda tensors: {},
    "one matrix missing": lambda tensors: {name: tensors[name] for name in sorted(tensors)[1:]},
    "a number for a matrix": _of_first(lambda tensor: tensor.flat[0]),
    "a row for a matrix": _of_first(lambda tensor: tensor[0]),
    "whole numbers": _of_first(lambda tensor: tensor.astype("int64")),
    "truth values": _of_first(lambda tensor: tensor > 0),
    "NaN": _of_first(lambda tensor: tensor * NAN),
    "infinity": _of_first(lambda tensor: tensor + numpy.inf),
    "rank 0": _of_first(lambda tensor: tensor[:0]),
    "other ranks": _of_first(lambda tensor: tensor[:2]),
    "another width": _of_first(lambda tensor: tensor[:, :2]),
    "alpha of NaN": _next_to_first(".alpha", numpy.float32(NAN).reshape(())),
    "alpha of 0": _next_to_first(".alpha", numpy.zeros((), "float32")),
    "alpha with an axis": _next_to_first(".alpha", numpy.ones(3, "float32")),
    "alpha of another layer": lambda tensors: {**tensors, "x.alpha": numpy.ones((), "float32")},
    "alpha that is complex": _next_to_first(".alpha", numpy.ones((), "complex64")),
    "a DoRA's scale": _next_to_first(".dora_scale", numpy.ones(4, "float32")),
    "a DoRA's magnitude": _next_to_first(".lora_magnitude_vector", numpy.ones(4, "float32")),
    "a bias": _next_to_first(".lora_B.bias", numpy.ones(4, "float32")),
    "a layer of no model": lambda tensors: {
        **tensors,
        "transformer.x.lora_A.weight": numpy.ones((4, 4), "float32"),
        "transformer.x.lora_B.weight": numpy.ones((4, 4), "float32"),
    },
}
