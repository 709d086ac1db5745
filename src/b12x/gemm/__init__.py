"""Dense GEMMs and fused linears. ``gemm.mm`` is ``gemm.blockscaled.mm``; ``bmm`` and its companions are functions."""

from b12x._runtime.lazy import attach

_MODULES = (
    "block_fp8_linear",
    "blockscaled",
    "mla_query_projection",
    "mxfp8_linear",
    "tensor_fp8_linear",
    "wo_projection",
)
_BMM = ("bmm", "can_implement_bmm", "is_bmm_supported", "prewarm_bmm")

__all__ = [
    "block_fp8_linear",
    "blockscaled",
    "bmm",
    "can_implement_bmm",
    "is_bmm_supported",
    "mla_query_projection",
    "mm",
    "mxfp8_linear",
    "prewarm_bmm",
    "tensor_fp8_linear",
    "wo_projection",
]

__getattr__ = attach(
    __name__, {name: f".{name}" for name in _MODULES} | dict.fromkeys(_BMM, "._bmm") | {"mm": ".blockscaled"}
)
