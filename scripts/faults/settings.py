"""Every setting with another value for it, and whether a run may be continued with it."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

Change: TypeAlias = tuple[str, ...]
Verdict = Literal["never", "data", "named", "free"]

BASE: Change = (
    *("validation.prompts=[]", "validation.loss_items=2", "train.steps=4", "train.ema_decay=0.6"),
    *("train.lr_scheduler=cosine", "objective.timestep_density=logit_normal"),
    *("objective.shift=static", "objective.shift_value=3"),
)
"""Settings of the run that is continued: each of those below matters to it."""

_SIZED = ("data.width=null", "data.height=null")

# A setting that has no effect without another is refused, so it comes together with that one.
NEVER: dict[str, Change] = {
    "model.family": ("model.family=wan",),
    "model.dtype": ("model.dtype=bfloat16",),
    "model.quantize": ("model.quantize=int8",),
    "model.quantize_skip": ("model.quantize=int8", "model.quantize_skip=[to_q]"),
    "model.text_encoder_dtype": ("model.text_encoder_dtype=bfloat16",),
    "model.text_encoder_quantize": ("model.text_encoder_quantize=int8",),
    "model.vae_dtype": ("model.vae_dtype=bfloat16",),
    "model.vae_tiling": ("model.vae_tiling=true",),
    "lora.rank": ("lora.rank=8",),
    "lora.alpha": ("lora.alpha=4",),
    "lora.kind": ("lora.kind=dora",),
    "lora.use_rslora": ("lora.use_rslora=true",),
    "lora.init": ("lora.init=orthogonal",),
    "lora.lokr_factor": ("lora.lokr_factor=2",),
    "lora.dropout": ("lora.dropout=0.2",),
    "lora.components": ("lora.components=[transformer]",),
    "lora.target_modules": ("lora.target_modules=[to_q]",),
    "lora.target_blocks": ("lora.target_blocks=[transformer_blocks.0]",),
    "lora.loraplus_ratio": ("lora.loraplus_ratio=4",),
    "lora.groups": ("lora.groups=[{match: to_q, rank: 2}]",),
    "objective.timestep_density": ("objective.timestep_density=uniform",),
    "objective.logit_mean": ("objective.logit_mean=0.5",),
    "objective.logit_std": ("objective.logit_std=0.5",),
    "objective.mode_scale": ("objective.timestep_density=mode", "objective.mode_scale=0.5"),
    "objective.shift": ("objective.shift=none", "objective.shift_value=null"),
    "objective.shift_value": ("objective.shift_value=2",),
    "objective.sigma_min": ("objective.sigma_min=0.1",),
    "objective.sigma_max": ("objective.sigma_max=0.9",),
    "objective.loss": ("objective.loss=huber",),
    "objective.huber_delta": ("objective.loss=huber", "objective.huber_delta=0.3"),
    "objective.loss_weighting": ("objective.loss_weighting=bell",),
    "objective.guidance_target": ("objective.guidance_target=3",),
    "objective.audio_loss_weight": ("objective.audio_loss_weight=0.5",),
    "objective.audio_noise": ("data.audio=true", "objective.audio_noise=own"),
    "objective.min_snr_gamma": ("objective.loss_weighting=min_snr", "objective.min_snr_gamma=3"),
    "train.seed": ("train.seed=1",),
    "train.optimizer": ("train.optimizer=muon",),
    "train.global_batch_size": ("train.global_batch_size=8",),
    "train.micro_batch_tokens": ("train.micro_batch_tokens=4096",),
    "train.mixed_precision": ("train.mixed_precision=bf16",),
}
"""That would be another run."""

DATA: dict[str, Change] = {
    "data.repeats": ("data.repeats=2",),
    "data.weight": ("data.weight=0.5",),
    "data.trigger": ("data.trigger=ohwx",),
    "data.loss_weight": ("data.path=null", "data.sources=[{path: a, loss_weight: 2}, {path: b}]"),
    "data.preserve": ("data.path=null", "data.sources=[{path: a}, {path: b, preserve: true}]"),
    "data.width": ("data.width=32",),
    "data.height": ("data.height=16",),
    "data.resolutions": (*_SIZED, "data.resolutions=[32]"),
    "data.sizes": (*_SIZED, "data.sizes=[64x32]"),
    "data.bucket_step": (*_SIZED, "data.resolutions=[32]", "data.bucket_step=32"),
    "data.max_aspect_ratio": (*_SIZED, "data.resolutions=[32]", "data.max_aspect_ratio=3"),
    "data.upscale": ("data.upscale=true",),
    "data.frame_counts": ("data.frame_counts=[1]",),
    "data.fps": ("data.fps=8",),
    "data.audio": ("data.audio=true",),
    "data.silent_clips": ("data.silent_clips=learn",),
    "data.clip": ("data.clip=center",),
    "data.clips_per_video": ("data.clip=uniform", "data.clips_per_video=2"),
    "data.crop": ("data.crop=random",),
    "data.crops_per_item": ("data.crop=random", "data.crops_per_item=2"),
    "data.background": ("data.background=black",),
    "data.caption_dropout": ("data.caption_dropout=0.3",),
    "data.tag_shuffles": ("data.tag_shuffles=2",),
    "data.tag_separator": ("data.tag_separator=;",),
    "data.keep_tags": ("data.keep_tags=1",),
}
"""Allowed by ``resume.allow: [data]``."""

NAMED: dict[str, Change] = {
    "train.steps": ("train.steps=5",),
    "train.micro_batch_size": ("train.micro_batch_size=4",),
    "train.learning_rate": ("train.learning_rate=0.02",),
    "train.lr_scheduler": ("train.lr_scheduler=linear",),
    "train.warmup_steps": ("train.warmup_steps=1",),
    "train.adam_beta1": ("train.adam_beta1=0.8",),
    "train.adam_beta2": ("train.adam_beta2=0.9",),
    "train.adam_epsilon": ("train.adam_epsilon=1e-6",),
    "train.weight_decay": ("train.weight_decay=0.1",),
    "train.optimizer_options": ("train.optimizer_options={amsgrad: true}",),
    "train.max_grad_norm": ("train.max_grad_norm=0.5",),
    "train.ema_decay": ("train.ema_decay=0.7",),
    "train.compile": ("train.compile=blocks",),
}
"""Allowed by their own name in ``resume.allow``."""

FREE: dict[str, Change] = {
    "lora.init_from": ("lora.init_from=elsewhere",),
    "data.allow_outside": ("data.allow_outside=true",),
    "data.cache": ("data.cache=false",),
    "data.on_bad_item": ("data.on_bad_item=skip",),
    "data.max_bad_ratio": ("data.max_bad_ratio=0.5",),
    "data.num_workers": ("data.num_workers=1",),
    "train.use_gradient_checkpointing": ("train.use_gradient_checkpointing=false",),
    "train.use_gradient_checkpointing_offload": ("train.use_gradient_checkpointing_offload=true",),
    "train.deterministic": ("train.deterministic=true",),
    "train.step_timeout_minutes": ("train.step_timeout_minutes=30",),
    "train.cpu_threads": ("train.cpu_threads=2",),
    "memory.auto": ("memory.auto=true",),
    "memory.may_change": ("memory.auto=true", "memory.may_change=[micro_batch_size]"),
    "memory.min_bytes": ("memory.min_bytes=5",),
    "memory.host_gib": ("memory.host_gib=1",),
    "memory.resident_blocks": ("memory.resident_blocks=0",),
    "memory.prefetched_blocks": ("memory.prefetched_blocks=0",),
    "memory.policy": ("memory.policy=last_k", "memory.policy_n=1"),
    "memory.policy_n": ("memory.policy=first_k", "memory.policy_n=2"),
    "memory.policy_blocks": ("memory.policy=only", "memory.policy_blocks=[0]"),
    "memory.save_attention": ("memory.save_attention=keep",),
    "memory.device_gib": ("memory.stream_blocks=auto", "memory.device_gib=1"),
    "memory.stream_blocks": ("memory.stream_blocks=all", "memory.stream_slots=1"),
    "memory.stream_slots": ("memory.stream_blocks=2", "memory.stream_slots=1"),
    "memory.stream_text_encoder": ("memory.stream_text_encoder=true", "memory.stream_slots=1"),
    "memory.skip_dead_ops": ("memory.skip_dead_ops=false",),
    "validation.prompts": ("validation.prompts=[a red circle]",),
    "validation.model_path": ("validation.prompts=[a red circle]", "validation.model_path=elsewhere"),
    "validation.negative_prompt": ("validation.negative_prompt=grey",),
    "validation.every_steps": ("validation.every_steps=1",),
    "validation.num_inference_steps": ("validation.num_inference_steps=3",),
    "validation.guidance_scale": ("validation.guidance_scale=1",),
    "validation.seed": ("validation.seed=5",),
    "validation.width": ("validation.width=32",),
    "validation.height": ("validation.height=64",),
    "validation.loss_items": ("validation.loss_items=1",),
    "validation.item_losses": ("validation.item_losses=1",),
    "validation.use_ema": ("validation.use_ema=false",),
    "logging.every_steps": ("logging.every_steps=2",),
    "logging.trackers": ("logging.trackers=[tensorboard]",),
    "logging.project": ("logging.project=another",),
    "logging.run_name": ("logging.run_name=another",),
    "logging.wandb_mode": ("logging.wandb_mode=offline",),
    "output.dir": (),
    "output.checkpoint_every_minutes": ("output.checkpoint_every_minutes=1",),
    "output.keep_every_steps": ("output.keep_every_steps=2",),
    "output.keep_best": ("output.keep_best=false",),
    "output.lora_dtype": ("output.lora_dtype=float16",),
    "output.checkpoint_every_steps": ("output.checkpoint_every_steps=1",),
    "output.keep_checkpoints": ("output.keep_checkpoints=1",),
}
"""Free to change, and every number stays the same. ``output.dir`` is changed in each case below."""

ELSEWHERE: dict[str, Change] = {
    "model.path": ("model.path=elsewhere",),
    "model.revision": ("model.revision=other",),
    "model.variant": ("model.variant=fp16",),
    "model.transformer_file": ("model.transformer_file=other.safetensors",),
    "model.training_adapter": ("model.training_adapter=other.safetensors",),
    "model.transformer_2_file": ("model.transformer_2_file=other.safetensors",),
    "data.path": ("data.path=elsewhere",),
    "data.cache_dir": ("data.cache_dir=elsewhere",),
    "data.sealed": ("data.sealed=elsewhere",),
    "data.sources": ("data.path=null", "data.sources=[{path: elsewhere}]"),
    "data.dataset": ("data.path=null", "data.dataset=owner/name"),
    "data.split": ("data.path=null", "data.dataset=owner/name", "data.split=test"),
    "data.revision": ("data.path=null", "data.dataset=owner/name", "data.revision=other"),
    "data.metadata": ("data.metadata=other.csv",),
    "data.media_column": ("data.metadata=other.csv", "data.media_column=file"),
    "data.caption_columns": ("data.metadata=other.csv", "data.caption_columns=[caption]"),
    "data.input_columns": ("data.metadata=other.csv", "data.input_columns=[before]"),
    "data.first_frame_column": ("data.metadata=other.csv", "data.first_frame_column=start"),
    "data.last_frame_column": ("data.metadata=other.csv", "data.last_frame_column=end"),
    "data.mask_column": ("data.metadata=other.csv", "data.mask_column=mask"),
    "data.layer_columns": ("data.metadata=other.csv", "data.layer_columns=[layers]"),
    "data.input_dirs": ("data.input_dirs=[elsewhere]",),
    "data.first_frame_dir": ("data.first_frame_dir=elsewhere",),
    "data.last_frame_dir": ("data.last_frame_dir=elsewhere",),
    "data.mask_dir": ("data.mask_dir=elsewhere",),
    "data.control_column": ("data.metadata=other.csv", "data.control_column=edges"),
    "data.control_dir": ("data.control_dir=elsewhere",),
    "data.inpaint_mask_column": ("data.metadata=other.csv", "data.inpaint_mask_column=hole"),
    "data.inpaint_mask_dir": ("data.inpaint_mask_dir=elsewhere",),
    "data.random_masks": ("data.random_masks=2",),
    "data.layer_dirs": ("data.layer_dirs=[elsewhere]",),
    "data.captions": ("data.captions=optional",),
    "validation.control": ("validation.prompts=[a red circle]", "validation.control=[edges.png]"),
    "validation.inpaint_masks": ("validation.prompts=[a red circle]", "validation.inpaint_masks=[hole.png]"),
    "validation.inputs": ("validation.prompts=[a red circle]", "validation.inputs=[start.png]"),
    "validation.last_frames": (
        *("validation.prompts=[a red circle]", "validation.inputs=[start.png]"),
        "validation.last_frames=[end.png]",
    ),
    "validation.num_frames": ("validation.num_frames=9",),
    "validation.num_layers": ("validation.num_layers=2",),
    "validation.data": ("validation.data=elsewhere",),
    "memory.shard_base": ("memory.shard_base=all",),
    "train.context_parallel": ("train.context_parallel=2",),
    "train.context_parallel_kind": ("train.context_parallel=2", "train.context_parallel_kind=ring"),
}
"""Where things are read: free as settings; the weights and items that are found there are compared. And what
needs several processes, which K3 changes."""

NEEDED: Mapping[str, Change] = {
    **dict.fromkeys(("train.context_parallel", "train.context_parallel_kind"), ("lora.dropout=0",)),
    "lora.lokr_factor": ("lora.kind=lokr", "lora.dropout=0"),
}
"""What the run that is continued has beside ``BASE``, where a change is refused without."""

NOT_OF_PICTURES = frozenset(
    [
        *("model.family", "lora.components", "data.loss_weight", "data.preserve"),
        *("data.frame_counts", "data.fps", "data.clip", "data.clips_per_video"),
    ]
)
"""Changes that the tiny pipeline of pictures, or its one folder, refuses before anything is compared."""

TABLES: Mapping[Verdict, Mapping[str, Change]] = {
    "never": NEVER,
    "data": DATA,
    "named": NAMED,
    "free": FREE | ELSEWHERE,
}
