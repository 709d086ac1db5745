"""Device code of the quantization group."""
