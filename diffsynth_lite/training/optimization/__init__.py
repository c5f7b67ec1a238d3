"""How gradients change the LoRA: optimizers, their learning rates, and averages of the weights."""
