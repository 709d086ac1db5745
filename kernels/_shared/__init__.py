"""Building blocks that kernels share: PTX operations, scale layouts, pipelines, quantisation arithmetic."""
