"""Images and clips on demand: base model and LoRAs side by side, drawn as the previews of a run are."""
