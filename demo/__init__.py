"""The main job: a sentence-embedding model whose linear layers run as NVFP4 kernels. See ``make demo``."""
