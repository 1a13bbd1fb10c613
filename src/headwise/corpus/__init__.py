"""Texts as documents of token ids: files, tokenizers, what is trained on and what is held out, known relations."""
