"""How much memory loading takes at most, against what is kept, by format and files' dtype.

A Qwen-Image of random weights is written to disk in several files, twice: in float32 and in bfloat16. It is
its transformer, or its text encoder. Or it is the transformer of a FLUX.1, always as wide as the released
one, in one file and the original layout, which diffusers converts, in bfloat16 and in 8 bits with scales, as
ComfyUI has it. Each case then loads it in a process of
its own, in bfloat16, through the family. Anonymous memory is what a process cannot give back: pages of files
that it reads are the system's to drop.

    python scripts/benchmarks/loading.py [--component text_encoder] [--blocks 24] [--formats none int8 nf4]
    python scripts/benchmarks/loading.py --component flux_file --blocks 2

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
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from meters import mebibytes, print_table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from diffsynth_lite.core.weights import Quantization, weight_format
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.folder import ComponentFile
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, quantizable_encoder_layers
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.qwen_image import QwenImage

NUM_FILES = 6
INTERVAL_S = 0.001
DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")
COMPONENTS = ("transformer", "text_encoder", "flux_file")
FLUX_WIDTH = 3072
FLUX_FILE = "flux1.safetensors"


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


def write_flux(folder: Path, num_blocks: int, tensors: dict[str, Tensor]) -> None:
    """The transformer of a FLUX.1 in one file, by the names of its own repository, and its settings."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            num_layers=num_blocks, num_single_layers=num_blocks, guidance_embeds=True
        )
    model.save_config(folder / "transformer")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    save_file(tensors, folder / FLUX_FILE)


def in_8_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with each matrix in 8 bits, and its scale."""
    stored: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if tensor.ndim == 2:
            scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name.removesuffix('.weight')}.scale_weight"] = scale
    return stored


def flux_tensors(num_blocks: int) -> dict[str, Tensor]:
    """Random numbers in bfloat16 by the original names of a FLUX.1."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        for name, shape in flux_shapes(num_blocks).items()
    }


def flux_shapes(num_blocks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a FLUX.1's tensors, by their original names, with so many blocks of either kind."""
    width = FLUX_WIDTH
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, num_rows: int, num_columns: int = width) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (num_rows, num_columns), (num_rows,)

    linear("img_in", width, 64)
    linear("txt_in", width, 4096)
    for name, num_inputs in (("time_in", 256), ("guidance_in", 256), ("vector_in", 768)):
        linear(f"{name}.in_layer", width, num_inputs)
        linear(f"{name}.out_layer", width)
    for block in range(num_blocks):
        for part in (f"double_blocks.{block}.img", f"double_blocks.{block}.txt"):
            linear(f"{part}_mod.lin", 6 * width)
            linear(f"{part}_attn.qkv", 3 * width)
            linear(f"{part}_attn.proj", width)
            linear(f"{part}_mlp.0", 4 * width)
            linear(f"{part}_mlp.2", width, 4 * width)
            shapes |= {f"{part}_attn.norm.{name}_norm.scale": (128,) for name in ("query", "key")}
        single = f"single_blocks.{block}"
        linear(f"{single}.modulation.lin", 3 * width)
        linear(f"{single}.linear1", 7 * width)
        linear(f"{single}.linear2", width, 5 * width)
        shapes |= {f"{single}.norm.{name}_norm.scale": (128,) for name in ("query", "key")}
    linear("final_layer.linear", 64)
    linear("final_layer.adaLN_modulation.1", 2 * width)
    return shapes


def load(folder: Path, component: str, name: str) -> nn.Module:
    """The component in bfloat16, with its blocks or layers in a format or plain."""
    if component == "flux_file":
        file = ComponentFile(path=folder / FLUX_FILE, key="model.transformer_file")
        family: DiffusersFamily = Flux(PipelineFolder(path=folder, files={"transformer": file}))
    else:
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
    """What this process holds that is no page of a file."""
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


def measure_once(folder: Path, small: Path, component: str, name: str) -> Loaded:
    """One load, after that of a small model has imported and set up all that a first one does."""
    torch.set_num_threads(1)
    load(small, component, name)
    return measure(lambda: load(folder, component, name))


def measure_all(
    folders: Mapping[str, Path], small: Path, component: str, formats: Sequence[str]
) -> dict[tuple[str, str], Loaded]:
    """Each case by format and dtype of the files, in a new process of its own."""
    context = multiprocessing.get_context("spawn")
    measured = {}
    for name in formats:
        for dtype, folder in folders.items():
            with context.Pool(1) as pool:
                measured[name, dtype] = pool.apply(measure_once, (folder, small, component, name))
    return measured


def rows_of(measured: Mapping[tuple[str, str], Loaded]) -> list[dict[str, str]]:
    """A row for each case."""
    return [
        {
            "format": name,
            "files in": dtype,
            "model, MiB": mebibytes(loaded.kept),
            "peak, MiB": mebibytes(loaded.peak),
            "peak / model": f"{loaded.peak / loaded.kept:.3f}",
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
        if options.component == "flux_file":
            tensors = flux_tensors(options.blocks)
            folders = {"bfloat16": small, "fp8_scaled": Path(root) / "fp8_scaled"}
            write_flux(small, options.blocks, tensors)
            write_flux(folders["fp8_scaled"], options.blocks, in_8_bits(tensors))
            del tensors
        else:
            for dtype, folder in folders.items():
                write_model(folder, options.component, options.blocks, options.width, getattr(torch, dtype))
            write_model(small, options.component, 2, 128, torch.float32)
        rows = rows_of(measure_all(folders, small, options.component, options.formats))
    width = FLUX_WIDTH if options.component == "flux_file" else options.width
    size = f"{options.blocks} blocks of width {width}"
    print_table(f"Anonymous memory while {size} of a {options.component} load.", rows)


if __name__ == "__main__":
    main()
