"""A model of time: response lengths, the speed of GPUs, and how long generation and passes take."""
