"""KServe's Open Inference Protocol with Triton's extensions: the model's skills as tensors.

An adapter: a request becomes a message of kestrel.v1, and the same services answer it (docs/use/triton.md).
"""
