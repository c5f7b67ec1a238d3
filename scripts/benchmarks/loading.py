"""How much memory loading a transformer takes at most, against what is kept, by format and files' dtype.

A Qwen-Image of random weights is written to disk in several files, twice: in float32 and in bfloat16. Each
case then loads it in a process of its own, in bfloat16, through the family. Anonymous memory is what a
process cannot give back: pages of files that it reads are the system's to drop.

    python scripts/benchmarks/loading.py [--blocks 24] [--formats none int8 nf4] [--folder FOLDER]

Linux only: it reads /proc/self/status.
"""

import argparse
import json
import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from meters import mebibytes, print_table
from safetensors.torch import save_file
from torch import Tensor

from diffsynth_lite.core.weights import Quantization, weight_format
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.qwen_image import QwenImage

NUM_FILES = 6
INTERVAL_S = 0.001
DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one load took.

    Attributes:
        kept: bytes of the model's parameters.
        peak: most anonymous memory at once, in bytes, beyond that before.
        seconds: it took.
    """

    kept: int
    peak: int
    seconds: float


def write_model(folder: Path, num_blocks: int, width: int, dtype: torch.dtype) -> None:
    """A transformer of random weights in ``NUM_FILES`` files with an index, a tensor at a time in memory."""
    heads = width // 128
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(
            num_layers=num_blocks, num_attention_heads=heads, joint_attention_dim=64, in_channels=64
        )
    component = folder / "transformer"
    model.save_config(component)
    tensors = model.state_dict()
    size = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize / NUM_FILES
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    for place, (name, tensor) in enumerate(tensors.items(), start=1):
        part[name] = torch.randn(tensor.shape, generator=generator).mul_(0.02).to(dtype)
        if sum(each.nbytes for each in part.values()) < size and place < len(tensors):
            continue
        file = f"diffusion_pytorch_model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(part, component / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        part = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (component / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    pipeline = {"_class_name": "QwenImagePipeline", "transformer": ["diffusers", type(model).__name__]}
    (folder / "model_index.json").write_text(json.dumps(pipeline))


def load(folder: Path, name: str) -> torch.nn.Module:
    """The transformer in bfloat16, with its blocks in a format or plain."""
    family = QwenImage(PipelineFolder(path=folder))
    if name != "none":
        layers = tuple(quantizable_layers(family.empty_transformer(), family.block_lists))
        family.quantization = Quantization(format=weight_format(name), layers=layers, device=CPU)
    return family.load_transformer(torch.bfloat16)


def anonymous_bytes() -> int:
    """What this process holds that is no page of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says this since 4.5"
    return 1024 * int(found[1])


def measure(run: Callable[[], torch.nn.Module]) -> Loaded:
    """What a load takes in this process, looked at each millisecond."""
    before = peak = anonymous_bytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(INTERVAL_S):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started_at = time.perf_counter()
    model = run()
    seconds = time.perf_counter() - started_at
    is_over.set()
    watcher.join()
    kept = sum(parameter.nbytes for parameter in model.parameters())
    return Loaded(kept=kept, peak=max(peak, anonymous_bytes()) - before, seconds=seconds)


def measure_once(folder: Path, small: Path, name: str) -> Loaded:
    """One load, after that of a small model has imported and set up all that a first one does."""
    torch.set_num_threads(1)
    load(small, name)
    return measure(lambda: load(folder, name))


def measure_all(
    folders: Mapping[str, Path], small: Path, formats: Sequence[str]
) -> dict[tuple[str, str], Loaded]:
    """Each case by format and dtype of the files, in a new process of its own."""
    context = multiprocessing.get_context("spawn")
    measured = {}
    for name in formats:
        for dtype, folder in folders.items():
            with context.Pool(1) as pool:
                measured[name, dtype] = pool.apply(measure_once, (folder, small, name))
    return measured


def rows_of(measured: Mapping[tuple[str, str], Loaded]) -> list[dict[str, str]]:
    """A row for each case."""
    return [
        {
            "model.quantize": name,
            "files in": dtype,
            "model, MiB": mebibytes(loaded.kept),
            "peak, MiB": mebibytes(loaded.peak),
            "peak / model": f"{loaded.peak / loaded.kept:.3f}",
            "seconds": f"{loaded.seconds:.1f}",
        }
        for (name, dtype), loaded in measured.items()
    ]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--blocks", type=int, default=16, help="of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 128 (default: %(default)s)")
    parser.add_argument(
        "--formats", nargs="+", choices=("none", "int8", "nf4"), default=("none", "int8"), help="to measure"
    )
    parser.add_argument("--folder", type=Path, help="where the files go for a while")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, measure, print the table."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folders = {dtype: Path(root) / dtype for dtype in DTYPES}
        for dtype, folder in folders.items():
            write_model(folder, options.blocks, options.width, getattr(torch, dtype))
        small = Path(root) / "small"
        write_model(small, 2, 128, torch.float32)
        rows = rows_of(measure_all(folders, small, options.formats))
    print_table(f"Anonymous memory while {options.blocks} blocks of width {options.width} load.", rows)


if __name__ == "__main__":
    main()
