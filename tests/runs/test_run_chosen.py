"""A LoRA that a person chose while a run goes on, and the copies that a run writes for ComfyUI."""

from tiny_run import TinyRun, checkpoint_part, checkpoint_tensors, differing

from diffsynth_lite.cli.main import main
from diffsynth_lite.run_folder.loras import lora_copies


def test_a_run_that_goes_on_keeps_the_chosen_lora_and_is_otherwise_the_same_and_a_new_one_starts_from_it(
    begun_run: TinyRun, whole_run: TinyRun
) -> None:
    folder, chosen = begun_run.folder, checkpoint_part(begun_run.folder, 2)
    assert main(["choose", f"{folder}@2"]) == 0
    kept = (folder / "checkpoints" / "lora-00000002" / "pytorch_lora_weights.safetensors").read_bytes()
    few = ("output.keep_adapters=0", "output.keep_checkpoints=1")
    assert begun_run.train(*few) == 0
    copies = {copy.step: copy.path for copy in lora_copies(folder / "checkpoints")}
    assert sorted(copies) == [2, 4, 6]
    assert (copies[2] / "pytorch_lora_weights.safetensors").read_bytes() == kept
    assert differing(checkpoint_tensors(folder, 6), checkpoint_tensors(whole_run.folder, 6)) == []
    second = begun_run.root / "second"
    still = ("train.steps=1", "train.learning_rate=1e-30", "train.weight_decay=0")
    assert begun_run.train(f"lora.init_from={folder}@chosen", f"output.dir={second}", *still) == 0
    assert differing(checkpoint_part(second, 1), chosen) == []
