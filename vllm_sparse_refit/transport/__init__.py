"""Payload bytes between processes. Knows no tensors and no vLLM."""
