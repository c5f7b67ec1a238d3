"""This file knows what other trainers call our settings, so that messages can name ours.

The names are from the documents and example configs of sd-scripts and musubi-tuner (kohya), AkaneTendo25's
fork of the latter (docs/ltx_2.md), ai-toolkit and OneTrainer, SimpleTuner's documentation/OPTIONS.md,
DiffSynth-Studio's diffsynth/diffusion/parsers.py, and the training scripts in diffusers' examples/dreambooth.
"""

_THEIR_NAMES = {
    "model.path": "pretrained_model_name_or_path name_or_path base_model_name model_flavour "
    "model_id_with_origin_paths model_paths diffusers_path",
    "model.transformer_file": "dit transformer_path",
    "model.family": "arch model_family",
    "model.dtype": "base_model_default_dtype",
    "model.quantize": "quantization base_model_precision qtype fp8_base fp8_scaled fp8_models load_in_4bit "
    "bnb_quantization_config_path",
    "model.text_encoder_quantize": "quantize_te qtype_te fp8_llm fp8_t5 fp8_vl text_encoder_1_precision",
    "model.vae_tiling": "vae_enable_tiling",
    "lora.kind": "network_module network_type lora_type peft_type network.type adapter.type",
    "lora.use_rslora": "rslora rs_lora",
    "lora.init": "init_lora_weights",
    "lora.lokr_factor": "decompose_factor factor",
    "lora.rank": "network_dim lora_rank dim linear r",
    "lora.alpha": "network_alpha lora_alpha linear_alpha",
    "lora.dropout": "network_dropout lora_dropout dropout_probability",
    "model.attention": "attention_mechanism attn_mode attention_backend",
    "model.training_adapter": "assistant_lora_path preset_lora_path",
    "lora.init_from": "network_weights init_lora lora_model_name lora_checkpoint",
    "lora.components": "lora_base_model trainable_models",
    "lora.target_modules": "lora_layers lora_target_modules layer_filter flux_lora_target",
    "data.path": "train_data_dir instance_data_dir image_dir image_directory video_directory folder_path "
    "dataset_base_path concepts.path directory.path",
    "data.sources": "datasets subsets concepts",
    "data.metadata": "in_json image_jsonl_file video_jsonl_file metadata_file dataset_metadata_path",
    "data.dataset": "dataset_name",
    "data.media_column": "image_column data_file_keys",
    "data.caption_columns": "caption_column parquet_caption_column",
    "data.repeats": "num_repeats dataset_repeat",
    "data.loss_weight": "prior_loss_weight diff_output_preservation_multiplier",
    "data.preserve": "diff_output_preservation blank_prompt_preservation is_regularisation_data",
    "data.trigger": "trigger_word class_tokens instance_prompt",
    "data.captions": "caption_strategy only_instance_prompt",
    "data.resolutions": "resolution",
    "data.sizes": "aspect_ratio_buckets",
    "data.crop": "center_crop random_crop crop_style",
    "data.bucket_step": "bucket_reso_steps aspect_bucket_alignment",
    "data.frame_counts": "target_frames frame_buckets",
    "data.fps": "source_fps framerate",
    "data.audio": "with_audio do_audio",
    "data.control_downscale": "reference_downscale_factor",
    "data.caption_dropout": "caption_dropout_rate caption_dropout_probability",
    "data.tag_shuffles": "shuffle_caption shuffle_tokens",
    "data.keep_tags": "keep_tokens",
    "data.cache": "cache_latents cache_latents_to_disk cache_text_embeddings cache_text_encoder_outputs "
    "cache_text_encoder_outputs_to_disk latent_caching",
    "data.cache_dir": "cache_directory cache_dir_vae",
    "data.num_workers": "max_data_loader_n_workers dataloader_num_workers dataset_num_workers "
    "caching_threads",
    "objective.shift": "flow_schedule_auto_shift",
    "objective.shift_value": "discrete_flow_shift timestep_shift flow_schedule_shift flux_schedule_shift",
    "objective.timestep_density": "timestep_sampling weighting_scheme timestep_distribution timestep_type",
    "objective.loss": "loss_type",
    "objective.audio_loss_weight": "audio_loss_multiplier",
    "objective.audio_noise": "independent_audio_timestep",
    "objective.huber_delta": "huber_c pseudo_huber_c",
    "objective.loss_weighting": "loss_weight_fn",
    "objective.min_snr_gamma": "snr_gamma",
    "objective.guidance_target": "guidance_loss_target do_guidance_loss",
    "train.optimizer": "optimizer_type optimizer.type",
    "train.optimizer_options": "optimizer_args optimizer_params optimizer_config",
    "lora.loraplus_ratio": "loraplus_lr_ratio loraplus_unet_lr_ratio",
    "lora.target_blocks": "layers_to_transform only_if_contains",
    "train.steps": "max_train_steps max_steps",
    "train.learning_rate": "lr unet_lr",
    "train.lr_scheduler": "learning_rate_scheduler lr_scheduler_type",
    "train.warmup_steps": "lr_warmup_steps learning_rate_warmup_steps num_warmup_steps",
    "train.micro_batch_size": "batch_size train_batch_size micro_batch_size_per_gpu",
    "train.weight_decay": "adam_weight_decay",
    "train.ema_decay": "ema_config",
    "train.max_grad_norm": "clip_grad_norm gradient_clipping",
    "train.mixed_precision": "train_dtype train.dtype",
    "train.use_gradient_checkpointing": "gradient_checkpointing activation_checkpointing",
    "train.use_gradient_checkpointing_offload": "gradient_checkpointing_cpu_offload "
    "cpu_offload_checkpointing",
    "train.compile": "dynamo_backend torch_compile",
    "train.cpu_threads": "num_cpu_threads_per_process",
    "memory.stream_blocks": "blocks_to_swap block_swap enable_group_offload enable_model_cpu_offload "
    "layer_offloading ramtorch",
    "memory.stream_text_encoder": "ramtorch_text_encoder",
    "memory.auto": "low_vram lowram",
    "validation.prompts": "sample_prompts validation_prompt validation_prompts user_prompt_library "
    "samples.prompt",
    "validation.negative_prompt": "neg validation_negative_prompt",
    "validation.every_steps": "sample_every sample_every_n_steps validation_steps validation_step_interval",
    "validation.num_frames": "validation_num_video_frames",
    "validation.num_inference_steps": "sample_steps validation_num_inference_steps",
    "validation.guidance_scale": "validation_guidance",
    "validation.seed": "validation_seed",
    "logging.trackers": "log_with report_to",
    "logging.project": "log_tracker_name tracker_project_name",
    "logging.run_name": "wandb_run_name tracker_run_name output_name config.name",
    "output.dir": "output_dir training_folder output_path workspace_dir output_model_destination",
    "output.checkpoint_every_steps": "save_every save_every_n_steps checkpointing_steps "
    "checkpoint_step_interval save_steps",
    "output.checkpoint_every_minutes": "checkpoint_every_n_minutes",
    "output.keep_checkpoints": "checkpoints_total_limit checkpoints_rolling_total_limit rolling_backup_count",
    "output.keep_adapters": "max_step_saves_to_keep save_last_n_steps",
    "output.lora_dtype": "save_precision output_dtype lora_weight_dtype",
    "resume.source": "resume_from_checkpoint continue_last_backup",
}
"""The names that others have for each setting of ours."""

_EPOCHS = "is train.steps here: passes over the data x items / train.global_batch_size"
_SAVE_EPOCHS = "is output.checkpoint_every_steps here, in steps: items / train.global_batch_size are a pass"
_SAMPLE_EPOCHS = "is validation.every_steps here, in steps: items / train.global_batch_size are a pass"
_ATTENTION = "is model.attention here, with diffusers' name of a kernel; without it torch chooses one"
_CLASS = (
    "is not a setting here; put images of other things of its kind into a second entry of data.sources, with "
    "preserve: true, so that the model stays as it is on them"
)
_HUB = "is not a setting here; diffsynth-lite publish puts a LoRA on the hub"
THEIR_SECTIONS = ("job", "process", "general", "dataset_config", "data_backend_config")
"""Sections of other trainers' configs; those that are ours by another name are not among them."""
_OTHERWISE = {
    **dict.fromkeys(("epochs", "max_train_epochs", "num_train_epochs", "num_epochs"), _EPOCHS),
    **dict.fromkeys(("save_every_n_epochs", "checkpoint_epoch_interval"), _SAVE_EPOCHS),
    **dict.fromkeys(
        ("sample_every_n_epochs", "validation_epochs", "validation_epoch_interval"), _SAMPLE_EPOCHS
    ),
    **dict.fromkeys(("class_data_dir", "class_prompt", "reg_data_dir", "is_reg"), _CLASS),
    **dict.fromkeys(("with_prior_preservation", "num_class_images"), _CLASS),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "huggingface_repo_id"), _HUB),
    **dict.fromkeys(("xformers", "sdpa", "flash_attn", "mem_eff_attn"), _ATTENTION),
    "use_8bit_adam": "is train.optimizer: adamw8bit here",
    "prodigy_d_coef": "is train.optimizer_options: {d_coef: ...} here",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation"),
        "is train.global_batch_size here: train.micro_batch_size x devices x forwards of a step",
    ),
    **dict.fromkeys(
        ("enable_bucket", "aspect_ratio_bucketing"),
        "is not a setting here, as items keep their shape without data.width and data.height; remove it",
    ),
    "budget": "is memory.device_gib here, with memory.auto: true",
    "max_pixels": "is data.resolutions here: the edge of a square of as many pixels",
    "validation_resolution": "is validation.width and validation.height here",
    "num_validation_images": "is not a setting here, as each of validation.prompts gives one preview",
    "num_frames": "is data.frame_counts here, a list; validation.num_frames is that of previews",
    "use_ema": "is train.ema_decay here; validation.use_ema asks for it in previews",
    "bucket_no_upscale": "is data.upscale here, the other way round",
    **dict.fromkeys(
        ("caption_extension", "caption_ext"),
        "is not a setting here, as .txt and .caption are read; remove it",
    ),
    "training_method": "is not a setting here, as only LoRAs are trained; lora.kind sets which kind",
    **dict.fromkeys(("use_dora", "dora_wd", "weight_decompose"), "is lora.kind: dora here"),
    **dict.fromkeys(
        ("lokr_full_rank", "full_matrix"),
        "is not a setting here, as lora.rank: 8192 trains a LoKr's factor whole",
    ),
    **dict.fromkeys(
        ("vae", "text_encoder", "ae"), "is not a setting here, as it is that of model.path; remove it"
    ),
    **dict.fromkeys(
        ("train_text_encoder", "network_train_unet_only", "train_unet"),
        "is lora.components here, which names what gets a LoRA",
    ),
    "text_encoder_lr": "is lora.groups here, such as [{match: text_encoder, learning_rate: 1e-5}]",
    **dict.fromkeys(
        ("max_sequence_length", "max_token_length", "tokenizer_max_length"),
        "is not a setting here, as each model family has its own; remove it",
    ),
    "model_type": "is model.family here; only LoRAs are trained",
    **dict.fromkeys(
        ("lora_format", "save_model_as"),
        "is not a setting here; diffsynth-lite convert writes files for other programs",
    ),
    "logging_dir": "is not a setting here, as logs are in output.dir; remove it",
    **dict.fromkeys(("network", "network_args"), "is the section lora here"),
    **dict.fromkeys(("sample", "samples"), "is the section validation here"),
    "save": "is the section output here",
    **dict.fromkeys(
        THEIR_SECTIONS,
        "is a section of another trainer's config; diffsynth-lite init --from THEIRS translates one",
    ),
}
"""Names of others that are not a setting here, and the equivalent."""


_CHANGES_BASE = "{} changes the base's weights, so that its file is wrong on the model that others have"
_NOT_READ = "neither diffusers nor this trainer can read a file of the kind {} back"
_IN_8_BITS = "model.quantize: int8 keeps the base in 8 bits, also that of a model.transformer_file in fp8"
_NO_GRADIENT = "{} has no gradients, which training needs"
_CODE_OF_THE_HUB = "{} is code that is downloaded from the hub, which is never run here"
_AUTO = {"auto": "memory.auto: true chooses it"}
_NOT_HERE = {
    "train.use_gradient_checkpointing": _AUTO,
    "train.use_gradient_checkpointing_offload": _AUTO,
    "memory.policy": _AUTO,
    "model.dtype": dict.fromkeys(("fp8", "fp8_e4m3fn", "float8", "float8_e4m3fn", "fp8_scaled"), _IN_8_BITS),
    "model.quantize": dict.fromkeys(("fp8", "fp8_e4m3fn", "float8", "qfloat8", "fp8_scaled"), _IN_8_BITS),
    "model.attention": {
        **{name: _NO_GRADIENT.format(name) for name in ("sage", "sage_varlen", "_flash_3")},
        **{name: _CODE_OF_THE_HUB.format(name) for name in ("flash_hub", "flash_varlen_hub", "flash_4_hub")},
        "flex": "flex is only fast where the whole model is compiled, not its blocks",
        "sdpa": "native is torch's scaled_dot_product_attention, as null is",
    },
    "lora.kind": {
        **{name: _NOT_READ.format(name) for name in ("loha", "oft", "oftv2", "boft", "hada")},
        **{
            name: f"{name} is a way to start a LoRA; " + _CHANGES_BASE.format("it")
            for name in ("pissa", "olora")
        },
        "rslora": "an rsLoRA is a LoRA with another scale; set lora.use_rslora: true",
    },
    "lora.init": {
        **{name: _CHANGES_BASE.format(name) for name in ("pissa", "olora", "corda", "loftq", "milora")},
        **{
            name: f"{name} needs a pass over the data, which there is not here" for name in ("eva", "lora_ga")
        },
    },
}
"""Values that other trainers accept and we do not, or not there, and why."""


def names_by_setting() -> dict[str, list[str]]:
    """The names that others have for each setting of ours that has any."""
    return {setting: names.split() for setting, names in _THEIR_NAMES.items()}


_OURS = {name: ours for ours, names in names_by_setting().items() for name in names}


def setting_named(key: str) -> str | None:
    """The setting of ours that others call ``key``, as ``section.key``."""
    return _OURS.get(_spelled(key))


def reason_against(setting: str, value: str) -> str | None:
    """Why a setting does not have a value that is known elsewhere; None where no reason is known."""
    return _NOT_HERE.get(setting, {}).get(_spelled(value))


def answer_to(key: str) -> str | None:
    """Our equivalent of a name of others, such as "is lora.rank here"; None for an unknown name."""
    ours = setting_named(key)
    return f"is {ours} here" if ours else _OTHERWISE.get(_spelled(key))


def _spelled(key: str) -> str:
    return key.lower().replace("-", "_")
