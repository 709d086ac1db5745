"""``toy.scale``: y = alpha * x, in variants that a build must accept or refuse."""
