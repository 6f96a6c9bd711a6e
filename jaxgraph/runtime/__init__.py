"""What connects plans to the native core: the module, the FFI call, the primitive."""
