"""A model of GPU and host memory: what is held in each phase, as named terms in GiB."""
