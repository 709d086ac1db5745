"""Device code in CuTe DSL. Imported by the build and by the JIT only, never by the runtime."""
