"""Metadata are put into a LoRA file so that equal files have equal bytes."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffsynth_lite.lora.file_header import add_metadata

TENSORS = {
    "b.lora_A.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a.alpha": torch.tensor(4.0),
    "c.lora_B.weight": torch.ones(3, 2, dtype=torch.bfloat16),
}


def test_a_file_with_metadata_has_the_same_tensors_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    own = {f"key{number}": "" for number in range(40)}
    added = {"modelspec.title": 'Žluťoučký 猫 "x"\n', "key7": "mine", "zz": "{}"}
    contents = set()
    for place, order in enumerate((own, dict(reversed(own.items())))):
        file = tmp_path / f"{place}.safetensors"
        save_file(TENSORS, file, metadata=order)
        add_metadata(file, dict(sorted(added.items(), reverse=bool(place))))
        contents.add(file.read_bytes())
    (content,) = contents
    read = load_file(file)
    assert read.keys() == TENSORS.keys()
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )

    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])["__metadata__"]
    digest = hashlib.sha256(content[8 + length :]).hexdigest()
    hashes = {"modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}
    assert header == {**own, **added, **hashes, "diffsynth_lite.dtype": "bfloat16"}
    assert list(header) == sorted(header)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == header
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0.safetensors", "1.safetensors"]
