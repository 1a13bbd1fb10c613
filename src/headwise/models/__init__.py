"""Any model, ours or one of transformers: open it, ask it, find its attention and the weights of its heads."""
