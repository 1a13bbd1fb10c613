"""A small GPT: its layers, presets, training, generation and checkpoints."""
