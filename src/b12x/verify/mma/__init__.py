"""The kernels of the MMA probe: chained ``mma.sync`` over K in one warp."""
