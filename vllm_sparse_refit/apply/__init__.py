"""Payloads into a live vLLM model. Knows no sockets."""
