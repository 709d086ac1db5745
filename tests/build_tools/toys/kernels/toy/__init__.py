"""Device code of the toy ops."""
