"""Scripts that measure; `make test` does not run them."""
