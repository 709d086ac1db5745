"""The build: manifests to specs, specs to inspected artifacts, artifacts to packs and wheels.

Imports neither torch nor a GPU driver; the DSL is imported only where a kernel is compiled (``compile_one``).
"""
