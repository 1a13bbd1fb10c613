"""Small models: tokens, corpora, training, and the baselines they have to beat."""
