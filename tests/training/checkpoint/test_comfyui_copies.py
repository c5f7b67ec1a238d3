"""Which LoRAs can be copied for ComfyUI, by family, layers and kind, and under which names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import load_family
from diffsynth_lite.training.checkpoint.comfyui_copies import ComfyuiCopies, require_comfyui_names


def config_of(family: str, kind: str = "lora", folder: Path = Path("there")) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(family=family),
        lora=SimpleNamespace(kind=kind),
        output=SimpleNamespace(copy_to=str(folder), dir="runs/mine"),
    )


def family_of(name: str, *files: str) -> Any:
    family = load_family(name)
    return SimpleNamespace(
        trained=("transformer",),
        lora_spelling=family.lora_spelling,
        lora_layers=family.lora_layers,
        lora_files=SimpleNamespace(by_name={file: ["transformer"] for file in files}),
    )


@pytest.mark.parametrize(
    ("family", "kind", "layer", "message"),
    [
        ("qwen_image", "lora", "transformer_blocks.0.attn.to_q", None),
        ("qwen_image", "dora", "transformer_blocks.0.attn.to_q", None),
        ("cogvideox", "lora", "transformer_blocks.0.attn1.to_q", None),
        ("hunyuan_video", "lora", "transformer_blocks.0.attn.to_q", None),
        ("hunyuan_video", "lokr", "transformer_blocks.0.attn.to_q", "only a plain LoRA of hunyuan_video"),
        ("cogvideox", "dora", "transformer_blocks.0.attn1.to_q", "only a plain LoRA of cogvideox"),
        ("sana", "lora", "transformer_blocks.0.attn1.to_q", "it is not known how ComfyUI names the layers"),
        ("ltx_video", "lora", "proj_in", "ComfyUI has no names for proj_in; leave them out of"),
    ],
)
def test_a_copy_needs_names_of_comfyui_for_all_layers(
    family: str, kind: str, layer: str, message: str | None
) -> None:
    given = config_of(family, kind), family_of(family), [layer]
    if message is None:
        require_comfyui_names(*given)
    else:
        with pytest.raises(UserError, match=f"^output.copy_to: {message}"):
            require_comfyui_names(*given)


def test_each_expert_has_a_file_of_its_own_and_a_resumed_run_takes_only_its_own(tmp_path: Path) -> None:
    files = ("pytorch_lora_weights_high_noise.safetensors", "pytorch_lora_weights_low_noise.safetensors")
    copies = ComfyuiCopies.of(config_of("wan", folder=tmp_path), family_of("wan", *files))
    copies.require_free(None)
    (tmp_path / "mine-low_noise.safetensors").write_text("of another program")
    for contract in (None, {"lora.rank": 4}):
        with pytest.raises(UserError, match=r"mine-low_noise\.safetensors is there already, and not of this"):
            copies.require_free(contract)
