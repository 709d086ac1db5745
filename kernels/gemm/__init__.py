"""Device code of the gemm group."""
