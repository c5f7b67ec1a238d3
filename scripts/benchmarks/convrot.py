"""Reading, a training step and its gradients with blocks in bfloat16, int8 and rotated int8, in one run.

The model is of LTX-Video's class, with random weights, Gaussian or with a few columns 30 times as large, read
from a file in bfloat16 or in ComfyUI's INT8 ConvRot; a LoRA on its attention trains. Times are ratios to int8
for reading and to bfloat16 for steps; errors of gradients are to those of float32 weights, by their norm.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from diffusers import LTXVideoTransformer3DModel
from meters import mebibytes, print_table, take_turns
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from diffsynth_lite.core.weights.formats import Int8ConvRot, weight_format
from diffsynth_lite.core.weights.frozen_linear import Quantization
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.pipelines.base.quantized import quantizable_layers, set_formats

_WAYS = {
    "float32": ("bfloat16", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int8_convrot": ("bfloat16", "int8_convrot"),
    "int8_convrot, from such a file": ("convrot", "int8_convrot"),
    "bfloat16, from such a file": ("convrot", None),
}
"""The file that each is read from, and ``model.quantize``."""


@dataclass(frozen=True)
class Subject:
    """Weights in files, and what is computed with them; ``layers`` are quantised."""

    files: dict[str, Path]
    layers: tuple[str, ...]
    arguments: argparse.Namespace

    def load(self, way: str) -> LTXVideoTransformer3DModel:
        """The model in one of the ways."""
        device, (file, quantize) = torch.device(self.arguments.device), _WAYS[way]
        with torch.device("meta"):
            model = _model(self.arguments)
        kept = {"layers": self.layers, "device": device}
        quantization = None if quantize is None else Quantization(format=weight_format(quantize), **kept)
        set_formats(model, torch.float32 if way == "float32" else torch.bfloat16, quantization)
        load_frozen(model, StoredTensors.in_files([self.files[file]]), device=device)
        return model

    def step(self, model: LTXVideoTransformer3DModel) -> Tensor:
        """Take a step, and return the gradients of the LoRA."""
        torch.manual_seed(2)
        device = torch.device(self.arguments.device)
        shape = {"device": device, "dtype": model.proj_in.weight.dtype}
        output = model(
            hidden_states=torch.randn(1, self.arguments.num_tokens, model.config.in_channels).to(**shape),
            encoder_hidden_states=torch.randn(1, 64, model.config.caption_channels).to(**shape),
            timestep=torch.tensor([500.0], device=device),
            encoder_attention_mask=torch.ones(1, 64, device=device),
            num_frames=1,
            height=self.arguments.num_tokens // 16,
            width=16,
        ).sample
        output.float().square().sum().backward()
        gradients = [one.grad.float().flatten() for one in model.parameters() if one.grad is not None]
        model.zero_grad(set_to_none=True)
        return torch.cat(gradients)


def _model(arguments: argparse.Namespace) -> LTXVideoTransformer3DModel:
    heads, width = arguments.num_heads, arguments.num_heads * 64
    sizes = {"num_layers": arguments.num_layers, "cross_attention_dim": width, "caption_channels": 256}
    return LTXVideoTransformer3DModel(num_attention_heads=heads, **sizes)


def subject_in(folder: Path, arguments: argparse.Namespace, *, has_outliers: bool) -> Subject:
    """Write the files of a model with random weights."""
    torch.manual_seed(0)
    model, kept = _model(arguments), Int8ConvRot()
    layers = tuple(quantizable_layers(model, ["transformer_blocks"]))
    plain = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    rotated = dict(plain)
    for name in layers:
        weight = model.get_submodule(name).weight.detach().normal_(std=0.02)
        if has_outliers:
            weight[:, torch.rand(weight.shape[1]) < 0.005] *= 30
        plain[f"{name}.weight"] = weight.bfloat16()
        values, scales = kept.empty(weight.shape[0], weight.shape[1], torch.device("cpu"))
        kept.write(weight, 0, values, scales)
        settings = {"format": "int8_tensorwise", "convrot": True}
        settings["convrot_groupsize"] = kept.group_of(weight.shape[1])
        rotated[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
        rotated |= {f"{name}.weight": values, f"{name}.weight_scale": scales}
    files = {kind: folder / f"{kind}.safetensors" for kind in ("bfloat16", "convrot")}
    save_file(plain, files["bfloat16"])
    save_file(rotated, files["convrot"])
    return Subject(files, layers, arguments)


def measured(subject: Subject) -> list[dict[str, str]]:
    """The rows of the table."""
    arguments = subject.arguments
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    turns = partial(take_turns, num_warmup=1, num_rounds=arguments.rounds, clock=clock)
    reads = turns({way: partial(subject.load, way) for way in _WAYS})
    models = {way: subject.load(way) for way in _WAYS}
    for model in models.values():
        torch.manual_seed(1)  # all get the same LoRA
        model.train().add_adapter(LoraConfig(target_modules=["to_q", "to_v"], init_lora_weights=False))
    steps = turns({way: partial(subject.step, model) for way, model in models.items()})
    exact = subject.step(models["float32"])
    read, step = statistics.median(reads["int8"]), statistics.median(steps["bfloat16"])
    return [
        {
            "blocks in": way,
            "MiB": mebibytes(sum(one.nbytes for one in models[way].parameters() if not one.requires_grad)),
            "read": f"{statistics.median(reads[way]) / read:.2f}",
            "step": f"{statistics.median(steps[way]) / step:.2f}",
            "gradient error": f"{float((subject.step(models[way]) - exact).norm() / exact.norm()):.2%}",
        }
        for way in _WAYS
    ]


def main() -> None:
    """Print a table of each kind of weights."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    for name, default in {"num-layers": 4, "num-heads": 12, "num-tokens": 1024, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    arguments = parser.parse_args()
    for has_outliers in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            rows = measured(subject_in(Path(folder), arguments, has_outliers=has_outliers))
        print_table("columns of large numbers" if has_outliers else "Gaussian weights", rows)


if __name__ == "__main__":
    main()
