"""This file has the graphics cards that are known by name, as their makers describe them.

It imports no torch: commands that only need the memory of a card look it up here.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
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


_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_GEFORCE = "https://www.nvidia.com/en-us/geforce/graphics-cards/compare/"
"""It has cores, clock and memory: two operations a core and clock in fp32, and four in bf16, as the white
papers have for the other cards of these generations."""
_LAPTOPS = "https://www.nvidia.com/en-us/geforce/laptops/compare/"
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_APPLE = "https://support.apple.com/docs/mac"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_CENTER = "https://www.nvidia.com/en-us/data-center"
_DESIGN = "https://www.nvidia.com/en-us/products/workstations"


_NO_BF16 = "It has no tensor cores for bf16, in which recipes train: no time is estimated."
_NOT_LISTED = "The card of this machine is not in the table of docs/memory.md: no time is estimated."
_APPLE_RATIO = 2 / 3
"""The GPU of a Mac shares the memory with everything else; macOS lets it have two thirds, or more of much."""


def _untimed(
    cards: Mapping[str, tuple[float, Sequence[int]]],
    *,
    source: str,
    remark: str,
    ratio: float = COUNTED_SHARE,
) -> Iterator[Gpu]:
    """Cards of which no time is estimated.

    Args:
        cards: GB a second (the least, if it depends on the size), and GiB of each size there is, by name.
    """
    for name, (bandwidth, sizes) in cards.items():
        for gib in sizes:
            yield Gpu(
                name=f"{name} {gib}GB" if len(sizes) > 1 else name,
                memory_gib=gib,
                bandwidth=bandwidth,
                source=source,
                remark=remark,
                usable_ratio=ratio,
            )


GPUS = (
    Gpu(name="RTX 3050 6GB", memory_gib=6, bf16=13.5, fp32=6.8, bandwidth=168, lanes=8, source=_GEFORCE),
    Gpu(name="RTX 3050 8GB", memory_gib=8, bf16=18.2, fp32=9.1, bandwidth=224, lanes=8, source=_GEFORCE),
    Gpu(name="RTX 3060 8GB", memory_gib=8, bf16=25.5, fp32=12.7, bandwidth=240, source=_GEFORCE),
    Gpu(name="RTX 3060 12GB", memory_gib=12, bf16=25.5, fp32=12.7, bandwidth=360, source=_GEFORCE),
    Gpu(name="RTX 3060 Ti", memory_gib=8, bf16=32.4, fp32=16.2, bandwidth=448, source=_GEFORCE),
    Gpu(name="RTX 3070", memory_gib=8, bf16=40.6, fp32=20.3, bandwidth=448, source=_AMPERE),
    Gpu(name="RTX 3070 Ti", memory_gib=8, bf16=43.5, fp32=21.7, bandwidth=608, source=_GEFORCE),
    Gpu(name="RTX 3080 10GB", memory_gib=10, bf16=59.5, fp32=29.8, bandwidth=760, source=_AMPERE),
    Gpu(name="RTX 3080 12GB", memory_gib=12, bf16=61.3, fp32=30.6, bandwidth=912, source=_GEFORCE),
    Gpu(name="RTX 3080 Ti", memory_gib=12, bf16=68.2, fp32=34.1, bandwidth=912, source=_GEFORCE),
    Gpu(name="RTX 3090", memory_gib=24, bf16=71, fp32=35.6, bandwidth=936, source=_AMPERE),
    Gpu(name="RTX 3090 Ti", memory_gib=24, bf16=80, fp32=40, bandwidth=1008, source=_GEFORCE),
    Gpu(name="RTX 4060", memory_gib=8, bf16=30.2, fp32=15.1, bandwidth=272, lanes=8, source=_GEFORCE),
    Gpu(name="RTX 4060 Ti 8GB", memory_gib=8, bf16=44.1, fp32=22.1, bandwidth=288, lanes=8, source=_GEFORCE),
    Gpu(
        name="RTX 4060 Ti 16GB", memory_gib=16, bf16=44.1, fp32=22.1, bandwidth=288, lanes=8, source=_GEFORCE
    ),
    Gpu(name="RTX 4070", memory_gib=12, bf16=58.3, fp32=29.1, bandwidth=504, source=_GEFORCE),
    Gpu(name="RTX 4070 SUPER", memory_gib=12, bf16=71, fp32=35.5, bandwidth=504, source=_GEFORCE),
    Gpu(name="RTX 4070 Ti", memory_gib=12, bf16=80.2, fp32=40.1, bandwidth=504, source=_GEFORCE),
    Gpu(name="RTX 4070 Ti SUPER", memory_gib=16, bf16=88.2, fp32=44.1, bandwidth=672, source=_GEFORCE),
    Gpu(name="RTX 4080", memory_gib=16, bf16=97.5, fp32=48.7, bandwidth=716.8, source=_ADA),
    Gpu(name="RTX 4080 SUPER", memory_gib=16, bf16=104.4, fp32=52.2, bandwidth=736, source=_GEFORCE),
    Gpu(name="RTX 4090", memory_gib=24, bf16=165.2, fp32=82.6, bandwidth=1008, source=_ADA),
    Gpu(name="RTX 5050", memory_gib=8, bf16=26.3, fp32=13.2, bandwidth=320, pcie=5, lanes=8, source=_GEFORCE),
    Gpu(name="RTX 5060", memory_gib=8, bf16=38.4, fp32=19.2, bandwidth=448, pcie=5, lanes=8, source=_GEFORCE),
    *(
        Gpu(
            name=f"RTX 5060 Ti {gib}GB",
            memory_gib=gib,
            bf16=47.4,
            fp32=23.7,
            bandwidth=448,
            pcie=5,
            lanes=8,
            source=_GEFORCE,
        )
        for gib in (8, 16)
    ),
    Gpu(name="RTX 5070", memory_gib=12, bf16=61.7, fp32=30.9, bandwidth=672, pcie=5, source=_BLACKWELL),
    Gpu(name="RTX 5070 Ti", memory_gib=16, bf16=87.9, fp32=43.9, bandwidth=896, pcie=5, source=_BLACKWELL),
    Gpu(name="RTX 5080", memory_gib=16, bf16=112.6, fp32=56.3, bandwidth=960, pcie=5, source=_BLACKWELL),
    Gpu(name="RTX 5090", memory_gib=32, bf16=209.5, fp32=104.8, bandwidth=1792, pcie=5, source=_BLACKWELL),
    # Of those below half of the number with sparsity, as their data sheets have it.
    Gpu(name="RTX A4000", memory_gib=16, bf16=76.7, fp32=19.2, bandwidth=448, source=f"{_DESIGN}/rtx-a4000/"),
    Gpu(
        name="RTX A5000", memory_gib=24, bf16=111.1, fp32=27.8, bandwidth=768, source=f"{_DESIGN}/rtx-a5000/"
    ),
    Gpu(
        name="RTX A6000", memory_gib=48, bf16=154.8, fp32=38.7, bandwidth=768, source=f"{_DESIGN}/rtx-a6000/"
    ),
    Gpu(
        name="RTX 6000 Ada",
        memory_gib=48,
        bf16=364.2,
        fp32=91.1,
        bandwidth=960,
        source=f"{_DESIGN}/rtx-6000/",
    ),
    Gpu(name="A10", memory_gib=24, bf16=125, fp32=31.2, bandwidth=600, source=f"{_CENTER}/products/a10-gpu/"),
    Gpu(name="A40", memory_gib=48, bf16=149.7, fp32=37.4, bandwidth=696, source=f"{_CENTER}/a40/"),
    Gpu(name="L4", memory_gib=24, bf16=121, fp32=30.3, bandwidth=300, source=f"{_CENTER}/l4/"),
    Gpu(name="L40", memory_gib=48, bf16=181, fp32=90.5, bandwidth=864, source=f"{_CENTER}/l40/"),
    Gpu(name="L40S", memory_gib=48, bf16=362, fp32=91.6, bandwidth=864, source=f"{_CENTER}/l40s/"),
    Gpu(name="A100 40GB", memory_gib=40, bf16=312, fp32=19.5, bandwidth=1555, source=_A100),
    Gpu(name="A100 40GB PCIe", memory_gib=40, bf16=312, fp32=19.5, bandwidth=1555, source=_A100),
    Gpu(name="A100 80GB", memory_gib=80, bf16=312, fp32=19.5, bandwidth=2039, source=_A100),
    Gpu(name="A100 80GB PCIe", memory_gib=80, bf16=312, fp32=19.5, bandwidth=1935, source=_A100),
    Gpu(name="H100", memory_gib=80, bf16=989.5, fp32=67, bandwidth=3350, pcie=5, source=_H100),
    Gpu(name="H100 PCIe", memory_gib=80, bf16=756.5, fp32=51, bandwidth=2000, pcie=5, source=_H100),
    Gpu(name="H200", memory_gib=141, bf16=989.5, fp32=67, bandwidth=4800, pcie=5, source=f"{_CENTER}/h200/"),
    *_untimed(
        {
            "RTX 2060": (336, (6, 12)),
            "RTX 2060 SUPER": (448, (8,)),
            "RTX 2070": (448, (8,)),
            "RTX 2070 SUPER": (448, (8,)),
            "RTX 2080": (448, (8,)),
            "RTX 2080 SUPER": (496, (8,)),
            "RTX 2080 Ti": (616, (11,)),
        },
        source=_GEFORCE,
        remark=_NO_BF16,
    ),
    *_untimed({"T4": (320, (16,))}, source=f"{_CENTER}/tesla-t4/", remark=_NO_BF16),
    *_untimed({"V100": (900, (16, 32))}, source=f"{_CENTER}/v100/", remark=_NO_BF16),
    *_untimed(
        {
            "RTX 3050 Laptop": (0, (4, 6)),
            "RTX 3050 Ti Laptop": (0, (4,)),
            "RTX 3060 Laptop": (0, (6,)),
            "RTX 3070 Laptop": (0, (8,)),
            "RTX 3070 Ti Laptop": (0, (8,)),
            "RTX 3080 Laptop": (0, (8, 16)),
            "RTX 3080 Ti Laptop": (0, (16,)),
            "RTX 4050 Laptop": (0, (6,)),
            "RTX 4060 Laptop": (0, (8,)),
            "RTX 4070 Laptop": (0, (8,)),
            "RTX 4080 Laptop": (0, (12,)),
            "RTX 4090 Laptop": (0, (16,)),
            "RTX 5050 Laptop": (0, (8,)),
            "RTX 5060 Laptop": (0, (8,)),
            "RTX 5070 Laptop": (0, (8,)),
            "RTX 5070 Ti Laptop": (0, (12,)),
            "RTX 5080 Laptop": (0, (16,)),
            "RTX 5090 Laptop": (0, (24,)),
        },
        source=_LAPTOPS,
        remark="The clock of a laptop's card is the choice of who built it: no time is estimated.",
    ),
    *_untimed(
        {
            "RX 6700 XT": (384, (12,)),
            "RX 6800": (512, (16,)),
            "RX 6800 XT": (512, (16,)),
            "RX 6900 XT": (512, (16,)),
            "RX 7600": (288, (8,)),
            "RX 7600 XT": (288, (16,)),
            "RX 7700 XT": (432, (12,)),
            "RX 7800 XT": (624, (16,)),
            "RX 7900 GRE": (576, (16,)),
            "RX 7900 XT": (800, (20,)),
            "RX 7900 XTX": (960, (24,)),
            "RX 9060 XT": (320, (8, 16)),
            "RX 9070": (640, (16,)),
            "RX 9070 XT": (640, (16,)),
            "PRO W7900": (864, (48,)),
            "MI300X": (5300, (192,)),
        },
        source="https://www.amd.com/en/products/specifications/graphics.html",
        remark="Nothing was tried on a card of AMD, and no time is estimated.",
    ),
    *_untimed(
        {
            "M1": (68, (8, 16)),
            "M1 Pro": (200, (16, 32)),
            "M1 Max": (400, (32, 64)),
            "M1 Ultra": (800, (64, 128)),
            "M2": (100, (8, 16, 24)),
            "M2 Pro": (200, (16, 32)),
            "M2 Max": (400, (32, 64, 96)),
            "M2 Ultra": (800, (64, 128, 192)),
            "M3": (100, (8, 16, 24)),
            "M3 Pro": (150, (18, 36)),
            "M3 Max": (300, (36, 48, 64, 96, 128)),
            "M3 Ultra": (819, (96, 256, 512)),
            "M4": (120, (16, 24, 32)),
            "M4 Pro": (273, (24, 48, 64)),
            "M4 Max": (410, (36, 48, 64, 128)),
        },
        source=_APPLE,
        remark="Nothing was tried on a Mac, whose GPU shares all memory, and no time is estimated.",
        ratio=_APPLE_RATIO,
    ),
)
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
    """What tells a card from others, and its memory where the name has it."""
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
