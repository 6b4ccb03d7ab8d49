"""Ranks of the FSDP engine against one rank of torch."""
