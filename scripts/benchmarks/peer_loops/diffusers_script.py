"""The loop of diffusers' training script, written again."""

from collections.abc import Generator

import torch
from accelerate import Accelerator
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.optimization import get_scheduler
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from peer_loops import LEARNING_RATE, WEIGHT_DECAY, MicroBatch, Work, padded

_NEVER = 10**9


class DiffusersScript:
    """The loop of diffusers' ``examples/dreambooth/train_dreambooth_lora_qwen_image.py`` (commit 02303d1c).

    With ``--cache_latents``, in one process, with the defaults of all that concerns a step. Left out is what
    comes between steps (checkpoints, validation), and its images, which its loader continues to stack when
    their latents are cached.

    Args:
        fused: of AdamW; the script does not set it.
    """

    def __init__(self, work: Work, *, fused: bool) -> None:
        self._accelerator = Accelerator(gradient_accumulation_steps=1, mixed_precision="no")
        self._levels = FlowMatchEulerDiscreteScheduler.from_pretrained(
            work.base, subfolder="scheduler", shift=3.0
        )
        self.model = self._build_model(work)
        optimizer = torch.optim.AdamW(
            [{"params": [weight for weight in self.model.parameters() if weight.requires_grad]}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.999),
            weight_decay=WEIGHT_DECAY,
            eps=1e-8,
            **({"fused": True} if fused else {}),
        )
        lr_scheduler = get_scheduler(
            "constant", optimizer=optimizer, num_warmup_steps=500, num_training_steps=_NEVER
        )
        loader = DataLoader(
            range(len(work.batches)),  # type: ignore[arg-type]
            shuffle=True,
            collate_fn=lambda _examples: {"prompts": [""] * len(work.batches[0].latents)},
        )
        self._transformer, self._optimizer, self._loader, self._lr_scheduler = self._accelerator.prepare(
            self.model, optimizer, loader, lr_scheduler
        )
        self._fill_caches(work)

    def _build_model(self, work: Work) -> nn.Module:
        model = QwenImageTransformer2DModel.from_pretrained(
            work.base, subfolder="transformer", dtype=torch.float32
        )
        model.requires_grad_(False)
        model.to(self._accelerator.device)
        if work.checkpointing:
            model.enable_gradient_checkpointing()
        model.add_adapter(
            LoraConfig(
                r=work.rank,
                lora_alpha=work.rank,
                lora_dropout=0.0,
                init_lora_weights="gaussian",
                target_modules=list(work.layers),
            )
        )
        return model

    def _fill_caches(self, work: Work) -> None:
        vae = AutoencoderKLQwenImage.load_config(work.base, subfolder="vae")
        self._scale = 2 ** len(vae["temperal_downsample"])
        self._resolution = work.batches[0].latents.shape[-1] * self._scale
        device = self._accelerator.device
        self._mean = torch.tensor(vae["latents_mean"], device=device).view(1, -1, 1, 1, 1)
        self._inverse_std = 1.0 / torch.tensor(vae["latents_std"], device=device).view(1, -1, 1, 1, 1)
        # With a variance of next to nothing: a sample is what the other loops train on.
        self._latents = [
            DiagonalGaussianDistribution(
                torch.cat(
                    [latents / self._inverse_std + self._mean, torch.full_like(latents, -30.0)],
                    dim=1,
                )
            )
            for latents in (batch.latents.to(device) for batch in work.batches)
        ]
        self._prompts = [padded(batch) for batch in work.batches]

    def steps(self) -> Generator[None, None, None]:
        progress = tqdm(desc="Steps")
        self._transformer.train()
        while True:
            for place, _ in enumerate(self._loader):
                loss = self._train_on(place)
                if self._accelerator.sync_gradients:
                    progress.update(1)
                logs = {"loss": loss.detach().item(), "lr": self._lr_scheduler.get_last_lr()[0]}
                progress.set_postfix(**logs)
                self._accelerator.log(logs)
                yield

    def _train_on(self, place: int) -> Tensor:
        accelerator = self._accelerator
        with accelerator.accumulate([self._transformer]):
            latents = (self._latents[place].sample() - self._mean) * self._inverse_std
            latents = latents.to(dtype=torch.float32)
            noise = torch.randn_like(latents)
            draws = compute_density_for_timestep_sampling(
                weighting_scheme="none",
                batch_size=len(latents),
                logit_mean=0.0,
                logit_std=1.0,
                mode_scale=1.29,
            )
            places = (draws * self._levels.config.num_train_timesteps).long()
            timesteps = self._levels.timesteps[places].to(device=latents.device)
            sigmas = self._sigmas_of(timesteps, latents.ndim)
            loss = self._loss_at(latents, noise, timesteps, sigmas, self._prompts[place])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self._transformer.parameters(), 1.0)
            self._optimizer.step()
            self._lr_scheduler.step()
            self._optimizer.zero_grad()
        return loss

    def _sigmas_of(self, timesteps: Tensor, ndim: int) -> Tensor:
        device = self._accelerator.device
        sigmas = self._levels.sigmas.to(device=device, dtype=torch.float32)
        known = self._levels.timesteps.to(device)
        places = [(known == timestep).nonzero().item() for timestep in timesteps.to(device)]
        return sigmas[places].flatten().view(-1, *[1] * (ndim - 1))

    def _loss_at(
        self,
        latents: Tensor,
        noise: Tensor,
        timesteps: Tensor,
        sigmas: Tensor,
        prompts: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        noisy = ((1.0 - sigmas) * latents + sigmas * noise).permute(0, 2, 1, 3, 4)
        count, channels, _, height, width = latents.shape
        side = self._resolution // self._scale // 2
        embeds, mask = (None if each is None else each.to(latents.device) for each in prompts)
        predicted = self._transformer(
            hidden_states=QwenImagePipeline._pack_latents(noisy, count, channels, height, width),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            timestep=timesteps / 1000,
            img_shapes=[(1, side, side)] * count,
            return_dict=False,
        )[0]
        predicted = QwenImagePipeline._unpack_latents(
            predicted, self._resolution, self._resolution, self._scale
        )
        weighting = compute_loss_weighting_for_sd3(weighting_scheme="none", sigmas=sigmas)
        error = weighting.float() * (predicted.float() - (noise - latents).float()) ** 2
        return torch.mean(error.reshape(count, -1), 1).mean()

    def loss(self, batch: MicroBatch, sigma: Tensor) -> Tensor:
        sigmas = sigma.view(-1, 1, 1, 1, 1)
        device = self._accelerator.device
        latents, noise, sigma, sigmas = (
            each.to(device) for each in (batch.latents, batch.noise, sigma, sigmas)
        )
        return self._loss_at(latents, noise, 1000 * sigma, sigmas, padded(batch))
