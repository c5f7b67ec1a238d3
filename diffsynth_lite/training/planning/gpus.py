"""This file has the graphics cards that are known by name, as their makers describe them.

It imports no torch: commands that only need the memory of a card look it up here.
"""

import csv
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from diffsynth_lite.config.files import if_in_clone
from diffsynth_lite.errors import UserError

if TYPE_CHECKING:
    from diffsynth_lite.core.planning.meters import Work

logger = logging.getLogger(__name__)

COUNTED_SHARE = 0.9
"""Usable fraction of the free memory of a device. The rest is for uncounted memory: kernels, fragments that
the allocator cannot use; how much these take was not measured on a GPU."""
_FLOPS_RATIO, _MEMORY_RATIO, _BUS_RATIO = 0.7, 0.85, 0.8
"""Assumptions: the parts of a data sheet's numbers that a training step and its copies reach."""
_TRANSFERS = {4: 16e9, 5: 32e9}
"""Bits a second of one lane each way, by the generation of PCI Express; 128 of 130 are data (PCI-SIG)."""
_MEMORY = re.compile(r"\s*(?<![a-z\d])(\d+)\s*g(i?b)?\b", re.IGNORECASE)
_MAKERS = {
    "nvidia": re.compile("nvidia|geforce|rtx|tesla|quadro"),
    "amd": re.compile("amd|radeon|instinct|rx"),
    "apple": re.compile("apple"),
}
"""What a name calls the maker of a card, whose data sheet is at the maker's address."""
_OPTIONAL_WORDS = re.compile(
    "|".join(words.pattern for words in _MAKERS.values())
    + r"|graphics|gpu|generation|blackwell|(workstation|server) edition|sxm\d?|hbm\d?e?|\W|_"
)
"""What a name may have or lack. Laptop, Ti, SUPER and PCIe are not among it: those are other cards."""
_MOST_NEAR = 2
_ANY_GIB = 8
"""Proposed as the memory of a card that is not near any other."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A graphics card.

    Attributes:
        name: ends with its memory where cards with more or less have the same name.
        bf16: dense TFLOPS of the tensor cores in bf16, added up in fp32; 0 where no time is estimated.
        bandwidth: of its memory, GB a second; 0 where its maker does not publish it.
        remark: a sentence on what is special about it, such as why no time is estimated.
        usable_ratio: fraction of its memory that is assumed to be free for training.
    """

    name: str
    memory_gib: int
    bf16: float = 0
    fp32: float = 0
    bandwidth: float = 0
    pcie: int = 4
    lanes: int = 16
    source: str
    remark: str = ""
    usable_ratio: float = COUNTED_SHARE

    @property
    def training_gib(self) -> float:
        """Its memory that is assumed to be free for training."""
        return self.usable_ratio * self.memory_gib

    @property
    def comparable_gib(self) -> float:
        """Memory of a card all of its own with as much that is free for training."""
        return self.usable_ratio / COUNTED_SHARE * self.memory_gib

    @property
    def is_timed(self) -> bool:
        """Whether the time of a step is estimated."""
        return self.bf16 > 0

    def seconds(self, work: "Work", itemsize: int) -> float:
        """How long this takes in numbers of so many bytes, as we assume."""
        flops = _FLOPS_RATIO * (self.bf16 if itemsize == 2 else self.fp32) * 1e12
        return work.flops / flops + work.num_bytes / (_MEMORY_RATIO * self.bandwidth * 1e9)

    @property
    def bus_bytes(self) -> float:
        """Bytes a second to host memory, and as many from it, as we assume."""
        return _BUS_RATIO * self.lanes * _TRANSFERS[self.pcie] * 128 / 130 / 8


_PAGES = {
    "ampere": "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    "ada": "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    "blackwell": (
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
        "nvidia-rtx-blackwell-gpu-architecture.pdf"
    ),
    # It has cores, clock and memory: two operations a core and clock in fp32, and four in bf16, as the white
    # papers have for the other cards of these generations.
    "geforce": "https://www.nvidia.com/en-us/geforce/graphics-cards/compare/",
    "laptops": "https://www.nvidia.com/en-us/geforce/laptops/compare/",
    # Of workstations and data centers half of the number with sparsity, as their data sheets have it.
    "workstations": "https://www.nvidia.com/en-us/products/workstations",
    "data-center": "https://www.nvidia.com/en-us/data-center",
    "a100": (
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
    ),
    "h100": "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    "amd": "https://www.amd.com/en/products/specifications/graphics.html",
    "apple": "https://support.apple.com/docs/mac",
}
"""Where the numbers are from, by the first word of ``page``; other words of it follow the address."""
_UNTIMED = {
    "no bf16": "It has no tensor cores for bf16, in which recipes train: no time is estimated.",
    "laptop": "The clock of a laptop's card is the choice of who built it: no time is estimated.",
    "amd": "Nothing was tried on a card of AMD, and no time is estimated.",
    "apple": "Nothing was tried on a Mac, whose GPU shares all memory, and no time is estimated.",
}
_NOT_LISTED = "The card of this machine is not in the table of docs/memory.md: no time is estimated."
_APPLE_RATIO = 2 / 3
"""The GPU of a Mac shares the memory with everything else; macOS lets it have two thirds, or more of much."""


def _listed() -> Iterator[Gpu]:
    """The cards of ``gpus.csv``: one of each size of its memory, with the least bandwidth of them."""
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        for row in csv.DictReader(file):
            page, _, place = row["page"].partition(" ")
            sizes = row["gib"].split()
            for gib in sizes:
                yield Gpu(
                    name=f"{row['name']} {gib}GB" if len(sizes) > 1 else row["name"],
                    memory_gib=int(gib),
                    bf16=float(row["bf16"] or 0),
                    fp32=float(row["fp32"] or 0),
                    bandwidth=float(row["bandwidth"] or 0),
                    pcie=int(row["pcie"] or 4),
                    lanes=int(row["lanes"] or 16),
                    source=_PAGES[page] + place,
                    remark=_UNTIMED.get(row["untimed"], ""),
                    usable_ratio=_APPLE_RATIO if page == "apple" else COUNTED_SHARE,
                )


GPUS = tuple(_listed())
ASSUMED_GPU = "RTX 4090"
"""Its ratios order settings where no card is named."""


def gpu_named(name: str) -> Gpu:
    """The card that people, or CUDA, call so: ``4090``, ``RTX4090``, ``NVIDIA GeForce RTX 4090``.

    Of a name with several memories it is the one with the smallest, and the others are logged.
    """
    found = _called(name)
    if not found:
        raise UserError(_unknown(name))
    if others := [gpu.name for gpu in found[1:]]:
        logger.warning(
            "--gpu %s: is taken to have %d GB; if yours has more, it is %s",
            *(name, found[0].memory_gib, _either(others)),
        )
    return found[0]


def gpu_of_device(name: str, num_bytes: float) -> Gpu:
    """The card that CUDA calls so, with as much memory as it has; one that is not known has no times."""
    has_enough = [gpu for gpu in _called(name) if num_bytes >= COUNTED_SHARE * gpu.memory_gib * 1024**3]
    if has_enough:
        return has_enough[-1]
    memory_gib = round(num_bytes / 1024**3)
    return Gpu(name=name, memory_gib=memory_gib, source="its driver", remark=_NOT_LISTED)


def _called(name: str) -> list[Gpu]:
    """The cards of a name, those with the smallest memory first."""
    found, memory_gib = _of_model(name), _identity(name)[1]
    if memory_gib is not None:
        found = [gpu for gpu in found if gpu.memory_gib == memory_gib]
    return sorted(found, key=lambda gpu: gpu.memory_gib)


def _of_model(name: str) -> list[Gpu]:
    """The cards of a name with any memory; a maker that it names is theirs."""
    model, words = _identity(name)[0], name.casefold()
    makers = [maker for maker, pattern in _MAKERS.items() if pattern.search(words)]
    same = [gpu for gpu in GPUS if _identity(gpu.name)[0] == model]
    return [gpu for gpu in same if all(f"{maker}.com" in gpu.source for maker in makers)]


def _identity(name: str) -> tuple[str, int | None]:
    """What distinguishes a card from others, and its memory where the name has it."""
    words = name.casefold().replace("mobile", "laptop")
    memory = _MEMORY.search(words)
    return _OPTIONAL_WORDS.sub("", _MEMORY.sub("", words)), int(memory[1]) if memory else None


def _unknown(name: str) -> str:
    model, memory_gib = _identity(name)
    near = [gpu.name for gpu in _of_model(name)]
    if not near:
        known = {models.casefold(): models for models in (_MEMORY.sub("", gpu.name) for gpu in GPUS)}
        written = f"rtx {model}" if model[:1].isdigit() else name.casefold()
        near = [known[one] for one in get_close_matches(written, known, n=_MOST_NEAR)]
    near_gib = next((gpu.memory_gib for gpu in GPUS if near and gpu.name.startswith(near[0])), _ANY_GIB)
    hint = f"did you mean {_either(near)}? " if near else ""
    listed = if_in_clone("docs/memory.md", "docs/memory.md lists all that are. ")
    return (
        f"--gpu {name}: not known; {hint}{listed}For another one init takes a "
        "card with as much memory; plan takes the memory itself, and gives no "
        f"times: --device-gib {memory_gib or near_gib}"
    )


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)
