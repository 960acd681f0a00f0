"""Inside a vLLM worker: the RPC methods, and the receiver that stages and commits transfers."""
