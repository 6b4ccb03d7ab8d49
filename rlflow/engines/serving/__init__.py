"""The parts of the vLLM engine."""
