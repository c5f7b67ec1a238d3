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


def _changes(*rows: str) -> dict[str, Change]:
    """Changes by the setting that each is of, which comes first; what it has no effect without follows."""
    return {row.partition("=")[0]: tuple(row.split(" & ")) if "=" in row else () for row in rows}


NEVER = _changes(
    *("model.family=wan", "model.dtype=bfloat16", "model.quantize=int8"),
    *("model.quantize_skip=[to_q] & model.quantize=int8", "model.text_encoder_dtype=bfloat16"),
    *("model.text_encoder_quantize=int8", "model.vae_dtype=bfloat16", "model.vae_tiling=true"),
    *("lora.rank=8", "lora.alpha=4", "lora.kind=dora", "lora.use_rslora=true", "lora.init=orthogonal"),
    *("lora.lokr_factor=2", "lora.dropout=0.2", "lora.components=[transformer]"),
    *("lora.target_modules=[to_q]", "lora.target_blocks=[transformer_blocks.0]"),
    *("lora.loraplus_ratio=4", "lora.groups=[{match: to_q, rank: 2}]"),
    *("objective.timestep_density=uniform", "objective.logit_mean=0.5", "objective.logit_std=0.5"),
    "objective.mode_scale=0.5 & objective.timestep_density=mode",
    *("objective.shift=none & objective.shift_value=null", "objective.shift_value=2"),
    *("objective.sigma_min=0.1", "objective.sigma_max=0.9", "objective.loss=huber"),
    *("objective.huber_delta=0.3 & objective.loss=huber", "objective.loss_weighting=bell"),
    *("objective.guidance_target=3", "objective.audio_loss_weight=0.5"),
    "objective.slider={triples: [{neutral: a, positive: b, negative: c}]}",
    "objective.audio_noise=own & data.audio=true",
    "objective.min_snr_gamma=3 & objective.loss_weighting=min_snr",
    *("train.seed=1", "train.optimizer=muon", "train.global_batch_size=8"),
    *("train.micro_batch_tokens=4096", "train.mixed_precision=bf16"),
)
"""That would be another run."""

DATA = _changes(
    *("data.repeats=2", "data.weight=0.5", "data.trigger=ohwx", "data.width=32", "data.height=16"),
    "data.resolutions=[32] & data.width=null & data.height=null",
    "data.sizes=[64x32] & data.width=null & data.height=null",
    "data.bucket_step=32 & data.width=null & data.height=null & data.resolutions=[32]",
    "data.max_aspect_ratio=3 & data.width=null & data.height=null & data.resolutions=[32]",
    *("data.upscale=true", "data.frame_counts=[1]", "data.fps=8", "data.audio=true"),
    "data.control_downscale=2",
    *("data.silent_clips=learn", "data.clip=center", "data.clips_per_video=2 & data.clip=uniform"),
    *("data.crop=random", "data.crops_per_item=2 & data.crop=random", "data.background=black"),
    *("data.caption_dropout=0.3", "data.tag_shuffles=2", "data.tag_separator=;", "data.keep_tags=1"),
    "data.hold_out=0.3",
) | {
    "data.loss_weight": ("data.path=null", "data.sources=[{path: a, loss_weight: 2}, {path: b}]"),
    "data.preserve": ("data.path=null", "data.sources=[{path: a}, {path: b, preserve: true}]"),
}
"""Allowed by ``resume.allow: [data]``."""

NAMED = _changes(
    *("train.steps=5", "train.micro_batch_size=4", "train.learning_rate=0.02"),
    *("train.lr_scheduler=linear", "train.warmup_steps=1", "train.adam_beta1=0.8"),
    *("train.adam_beta2=0.9", "train.adam_epsilon=1e-6", "train.weight_decay=0.1"),
    *("train.optimizer_options={maximize: true}", "train.max_grad_norm=0.5", "train.ema_decay=0.7"),
    *("train.compile=blocks", "model.attention=_native_math"),
)
"""Allowed by their own name in ``resume.allow``."""

FREE = _changes(
    "lora.init_from=elsewhere",
    *("data.allow_outside=true", "data.cache=false", "data.on_bad_item=skip", "data.max_bad_ratio=0.5"),
    "data.num_workers=1",
    *("train.use_gradient_checkpointing=false", "train.use_gradient_checkpointing_offload=true"),
    *("train.deterministic=true", "train.step_timeout_minutes=30", "train.cpu_threads=2"),
    "train.max_hours=5",
    *("memory.auto=true", "memory.may_change=[micro_batch_size] & memory.auto=true"),
    *("memory.min_bytes=5", "memory.host_gib=1", "memory.resident_blocks=0"),
    *("memory.prefetched_blocks=0", "memory.policy=last_k & memory.policy_n=1"),
    *("memory.policy_n=2 & memory.policy=first_k", "memory.policy_blocks=[0] & memory.policy=only"),
    *("memory.save_attention=keep", "memory.device_gib=1 & memory.stream_blocks=auto"),
    "train.compile_cache=true & train.compile=off",
    "memory.stream_blocks=all & memory.stream_slots=1",
    "memory.stream_slots=1 & memory.stream_blocks=2",
    *("memory.stream_text_encoder=true & memory.stream_slots=1", "memory.skip_dead_ops=false"),
    "validation.prompts=[a red circle]",
    *("validation.negative_prompt=grey", "validation.every_steps=1"),
    *("validation.num_inference_steps=3", "validation.guidance_scale=1", "validation.seed=5"),
    *("validation.width=32", "validation.height=64", "validation.loss_items=1"),
    *("validation.item_losses=1", "validation.use_ema=false"),
    *("logging.every_steps=2", "logging.trackers=[tensorboard]", "logging.project=another"),
    *("logging.run_name=another", "logging.wandb_mode=offline"),
    *("output.dir", "output.checkpoint_every_minutes=1", "output.keep_every_steps=2"),
    *("output.keep_best=false", "output.lora_dtype=float16", "output.checkpoint_every_steps=1"),
    *("output.keep_checkpoints=1", "output.keep_adapters=1", "output.copy_to=."),
)
"""Free to change, and every number stays the same. ``output.dir`` is changed in each case below."""

ELSEWHERE = _changes(
    "validation.model_path=elsewhere & validation.prompts=[a red circle]",
    *("model.path=elsewhere", "model.revision=other", "model.variant=fp16"),
    *("model.transformer_file=other.safetensors", "model.training_adapter=other.safetensors"),
    "model.transformer_2_file=other.safetensors",
    *("data.path=elsewhere", "data.cache_dir=elsewhere", "data.sealed=elsewhere"),
    *("data.sources=[{path: elsewhere}] & data.path=null", "data.dataset=owner/name & data.path=null"),
    "data.split=test & data.path=null & data.dataset=owner/name",
    *("data.revision=other & data.path=null & data.dataset=owner/name", "data.metadata=other.csv"),
    "data.media_column=file & data.metadata=other.csv",
    "data.caption_columns=[caption] & data.metadata=other.csv",
    "data.input_columns=[before] & data.metadata=other.csv",
    "data.first_frame_column=start & data.metadata=other.csv",
    "data.last_frame_column=end & data.metadata=other.csv",
    "data.mask_column=mask & data.metadata=other.csv",
    *("data.layer_columns=[layers] & data.metadata=other.csv", "data.input_dirs=[elsewhere]"),
    *("data.first_frame_dir=elsewhere", "data.last_frame_dir=elsewhere", "data.mask_dir=elsewhere"),
    *("data.control_column=edges & data.metadata=other.csv", "data.control_dir=elsewhere"),
    *("data.inpaint_mask_column=hole & data.metadata=other.csv", "data.inpaint_mask_dir=elsewhere"),
    *("data.face_column=face & data.metadata=other.csv", "data.face_dir=elsewhere"),
    *("data.random_masks=2", "data.layer_dirs=[elsewhere]", "data.captions=optional"),
    "validation.control=[edges.png] & validation.prompts=[a red circle]",
    "validation.faces=[face.mp4] & validation.prompts=[a red circle]",
    "validation.inpaint_masks=[hole.png] & validation.prompts=[a red circle]",
    "validation.inputs=[start.png] & validation.prompts=[a red circle]",
    "validation.last_frames=[end.png] & validation.prompts=[a red circle] & validation.inputs=[start.png]",
    *("validation.num_frames=9", "validation.num_layers=2", "validation.data=elsewhere"),
    "train.stop_after=2 & validation.data=elsewhere & validation.every_steps=1",
    "validation.scores=true & validation.data=elsewhere & validation.every_steps=1 "
    "& output.checkpoint_every_steps=1",
    *("validation.plain_prompts=[a dog]", "validation.score_models=[elsewhere, elsewhere]"),
    "memory.shard_base=all",
    *("train.context_parallel=2", "train.context_parallel_kind=ring & train.context_parallel=2"),
)
"""Where things are read: free as settings; the weights and items that are found there are compared. And what
needs several processes, which K3 changes."""

NEEDED: Mapping[str, Change] = {
    **dict.fromkeys(("train.context_parallel", "train.context_parallel_kind"), ("lora.dropout=0",)),
    "lora.lokr_factor": ("lora.kind=lokr", "lora.dropout=0"),
}
"""What the run that is continued has next to ``BASE``, where a change is refused without."""

NOT_OF_IMAGES = frozenset(
    [
        *("model.family", "lora.components", "data.loss_weight", "data.preserve"),
        *(
            "data.frame_counts",
            "data.fps",
            "data.clip",
            "data.clips_per_video",
            "data.audio",
            "data.control_downscale",
            "data.silent_clips",
        ),
    ]
)
"""Changes that the tiny pipeline of images, or its one folder, refuses before anything is compared."""

TABLES: Mapping[Verdict, Mapping[str, Change]] = {
    "never": NEVER,
    "data": DATA,
    "named": NAMED,
    "free": FREE | ELSEWHERE,
}
