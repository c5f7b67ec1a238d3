"""This file knows files of weights by their names and their headers, and distinguishes them by hashes."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from diffsynth_lite.errors import UserError

WEIGHT_SUFFIX = ".safetensors"
_VARIANT = re.compile(r"\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors$")
_SAMPLED_BLOCKS = 64
_SAMPLED_BLOCK_BYTES = 64 * 1024


def variant_of(name: str) -> str:
    """As in ``model.fp16.safetensors`` and ``model.fp16-00001-of-00002.safetensors``; else empty."""
    match = _VARIANT.search(name)
    return match[1] if match else ""


def variants(names: Iterable[str]) -> set[str]:
    """Those of some files' names; empty is the one of plain files."""
    return {variant_of(name) for name in names if name.endswith(WEIGHT_SUFFIX)}


def of_variant(names: Iterable[str], variant: str | None) -> list[str]:
    """Those of the files' names that are weights of a variant; None is the one of plain files."""
    wanted = variant or ""
    return [name for name in names if name.endswith(WEIGHT_SUFFIX) and variant_of(name) == wanted]


def which_variant(files: Mapping[str, Iterable[str]]) -> str:
    """Which variant would do; where none does, which each component has.

    Args:
        files: names, by component.
    """
    there = {component: variants(names) for component, names in files.items()}
    if of_all := sorted(set[str].intersection(*there.values())):
        return " or ".join(f"set model.variant: {one}" if one else "remove model.variant" for one in of_all)
    if not all(there.values()):
        return "complete the download, or check model.path and model.variant"
    listed = "; ".join(
        f"{component}: {', '.join(one or 'plain' for one in sorted(found))}"
        for component, found in there.items()
    )
    return (
        f"all components are loaded in one variant, and none is there for all of them ({listed}): get "
        "what is missing, or rename the files"
    )


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.startswith(("F", "BF"))

    @property
    def num_numbers(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


def header_of(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name; no number is read."""
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in list(opened.keys())}
            return {
                name: StoredTensor(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"model.path: the weights in {file.parent} cannot be read ({file.name}: {error}); "
            "get that file again"
        ) from error


def digest_of(small: Sequence[Path], weights: Sequence[Path], *, with_names: bool) -> str:
    """Hash of small files in full, and of weights by size, header and evenly spaced blocks.

    Args:
        with_names: whether other names of the weights make another hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in small:
        digest.update(path.name.encode() + path.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name if with_names else ''}:{size}".encode())
        stride = max(size // _SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES)
        with path.open("rb") as file:
            for offset in range(0, size, stride):
                file.seek(offset)
                digest.update(file.read(_SAMPLED_BLOCK_BYTES))
    return digest.hexdigest()
