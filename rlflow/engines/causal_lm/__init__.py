"""A causal language model of the transformers library, run without padding. Shared by the engines on it."""
