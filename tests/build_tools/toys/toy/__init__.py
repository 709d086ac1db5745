"""A group of ops that only the build's tests have."""
