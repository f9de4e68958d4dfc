"""The handbook of a lighthouse that does not exist: short documents whose facts `memkv demo` asks for."""
