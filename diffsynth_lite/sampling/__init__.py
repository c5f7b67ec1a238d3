"""Images and clips on demand: base model and LoRAs side by side, generated as the previews of a run are."""
