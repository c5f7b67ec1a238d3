"""Captions for images and clips, written by a model or by a server of OpenAI's chat protocol."""
