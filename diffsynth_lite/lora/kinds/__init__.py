"""Kinds of adapters: what trains beside a frozen layer, how peft makes it, and what it does to the layer."""
