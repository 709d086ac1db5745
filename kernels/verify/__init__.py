"""Device code of the verify group."""
