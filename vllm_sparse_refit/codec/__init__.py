"""Between tensors and payload bytes. Knows no sockets and no vLLM."""
