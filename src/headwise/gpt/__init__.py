"""A small GPT: its layers, presets, training, generation, checkpoints, and many processes."""
