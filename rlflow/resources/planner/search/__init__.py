"""The layouts that are tried: which roles share GPUs, how large pools are, and what each role does in its pool."""
