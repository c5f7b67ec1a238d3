"""What the tests of all families cannot know of the one for AuraFlow that is kept elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from my_families.aura_flow import AuraFlow, tiny
from safetensors.torch import load_file, save_file

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.updates import LoraPair, pairs_of
from diffsynth_lite.pipelines import PipelineFolder


def test_a_lora_that_its_pipeline_reads_is_taken_for_what_its_settings_say(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    family, lora = AuraFlow(PipelineFolder(path=tmp_path)), tmp_path / "lora"
    layers = [f"joint_transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k")]
    tensors = {f"{layer}.lora_{part}.weight": torch.ones(4, 4) for layer in layers for part in "AB"}
    (file,) = family.save_lora(lora, tensors, {"r": 4, "lora_alpha": 4, "target_modules": layers})
    stored = load_file(file)

    def read(**settings: object) -> dict[str, LoraPair]:
        said = {f"transformer.{name}": value for name, value in settings.items()}
        save_file(stored, file, {"format": "pt", "lora_adapter_metadata": json.dumps(said)})
        return pairs_of(*family.read_lora(lora))

    pairs = read(r=4, lora_alpha=8, alpha_pattern={"to_k": 2}, target_modules=layers)
    updates = [pairs[layer].up @ pairs[layer].down * (pairs[layer].alpha / 4) for layer in layers]
    assert [float(update[0, 0]) for update in updates] == [8, 2]
    with pytest.raises(UserError, match="is a DoRA by its settings"):
        read(r=4, lora_alpha=8, use_dora=True)
    save_file(stored, file, {"format": "pt", "lora_adapter_metadata": "[" * 100_000})
    with pytest.raises(UserError, match="holds no LoRA that AuraFlowPipeline can read"):
        family.read_lora(lora)
