"""A model on disk: shape, weights, tokenizer, chat template."""
