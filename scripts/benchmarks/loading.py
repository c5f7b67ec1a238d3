"""How much memory loading takes at most, against what is kept, by format and files' dtype.

A Qwen-Image of random weights is written to disk in several files, twice: in float32 and in bfloat16. It is
its transformer, or its text encoder. Each case then loads it in a process of its own, in bfloat16, through
the family. Anonymous memory is what a process cannot give back: pages of files that it reads are the system's
to drop.

    python scripts/benchmarks/loading.py [--component text_encoder] [--blocks 24] [--formats none int8 nf4]

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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from meters import mebibytes, print_table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from diffsynth_lite.core.weights import Quantization, weight_format
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, quantizable_encoder_layers
from diffsynth_lite.pipelines.qwen_image import QwenImage

NUM_FILES = 6
INTERVAL_S = 0.001
DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")
COMPONENTS = ("transformer", "text_encoder")


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


def empty_model(component: str, num_blocks: int, width: int) -> Any:
    """A component without numbers, on the meta device."""
    heads = width // 128
    with torch.device("meta"):
        if component == "transformer":
            return QwenImageTransformer2DModel(
                num_layers=num_blocks, num_attention_heads=heads, joint_attention_dim=64, in_channels=64
            )
        text = {
            "vocab_size": 8 * width,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": num_blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            # The rotary sections of time, height and width share half a head.
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        }
        vision = {"depth": 1, "hidden_size": 128, "intermediate_size": 256, "out_hidden_size": width}
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def write_model(folder: Path, component: str, num_blocks: int, width: int, dtype: torch.dtype) -> None:
    """A component of random weights in ``NUM_FILES`` files with an index, a tensor at a time in memory."""
    model = empty_model(component, num_blocks, width)
    place, stem = folder / component, "diffusion_pytorch_model"
    if component == "transformer":
        model.save_config(place)
    else:
        model.config.save_pretrained(place)
        stem = "model"
    tensors = model.state_dict()
    size = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize / NUM_FILES
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items(), start=1):
        part[name] = torch.randn(tensor.shape, generator=generator).mul_(0.02).to(dtype)
        if sum(each.nbytes for each in part.values()) < size and number < len(tensors):
            continue
        file = f"{stem}-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(part, place / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        part = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (place / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))


def load(folder: Path, component: str, name: str) -> nn.Module:
    """The component in bfloat16, with its blocks or layers in a format or plain."""
    family = QwenImage(PipelineFolder(path=folder))
    if name != "none":
        layers = (
            quantizable_encoder_layers(family.empty_component(component))
            if component == "text_encoder"
            else quantizable_layers(family.empty_transformer(), family.block_lists)
        )
        chosen = Quantization(format=weight_format(name), layers=tuple(layers), device=CPU)
        family.quantization = chosen
        family.text_encoder_memory = TextEncoderMemory(quantizations={"text_encoder": chosen})
    if component == "text_encoder":
        return family.load_text_encoders(torch.bfloat16, CPU)[component]
    return family.load_transformer(torch.bfloat16)


def anonymous_bytes() -> int:
    """What this process holds that is not a page of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says this since 4.5"
    return 1024 * int(found[1])


def measure(run: Callable[[], nn.Module]) -> Loaded:
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


def measure_once(folder: Path, name: str, small: Path, component: str) -> Loaded:
    """One load, after that of a small model has imported and set up all that a first one does."""
    torch.set_num_threads(1)
    load(small, component, name)
    return measure(lambda: load(folder, component, name))


def measure_all(
    folders: Mapping[str, Path], formats: Sequence[str], measure_one: Callable[..., Loaded], *given: object
) -> dict[tuple[str, str], Loaded]:
    """Each case by format and dtype of the files, measured in a new process of its own.

    Args:
        folders: of the files, by their dtype.
        formats: of the weights.
        measure_one: measures a folder and a format.
        given: what it gets besides.
    """
    context = multiprocessing.get_context("spawn")
    measured = {}
    for name, dtype in product(formats, folders):
        with context.Pool(1) as pool:
            measured[name, dtype] = pool.apply(measure_one, (folders[dtype], name, *given))
    return measured


def rows_of(measured: Mapping[tuple[str, str], Loaded]) -> list[dict[str, str]]:
    """A row for each case."""
    return [
        {
            "format": name,
            "files in": dtype,
            "kept, MiB": mebibytes(loaded.kept),
            "peak, MiB": mebibytes(loaded.peak),
            "peak / kept": f"{loaded.peak / loaded.kept:.3f}",
            "seconds": f"{loaded.seconds:.1f}",
        }
        for (name, dtype), loaded in measured.items()
    ]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of both benchmarks of loading."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--blocks", type=int, default=16, help="of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 128 (default: %(default)s)")
    parser.add_argument(
        "--formats", nargs="+", choices=("none", "int8", "nf4"), default=("none", "int8"), help="to measure"
    )
    parser.add_argument("--folder", type=Path, help="where the files go for a while")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, measure, print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--component", choices=COMPONENTS, default=COMPONENTS[0], help="to load")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folders = {dtype: Path(root) / dtype for dtype in DTYPES}
        small = Path(root) / "small"
        for dtype, folder in folders.items():
            write_model(folder, options.component, options.blocks, options.width, getattr(torch, dtype))
        write_model(small, options.component, 2, 128, torch.float32)
        rows = rows_of(measure_all(folders, options.formats, measure_once, small, options.component))
    size = f"{options.blocks} blocks of width {options.width}"
    print_table(f"Anonymous memory while {size} of a {options.component} load.", rows)


if __name__ == "__main__":
    main()
