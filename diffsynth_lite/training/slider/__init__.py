"""Sliders: a LoRA whose strength moves one property, learned from prompts."""
