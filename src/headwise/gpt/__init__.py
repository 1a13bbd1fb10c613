"""A small GPT: tokens, corpora, training, generation, and the baseline it has to beat."""
