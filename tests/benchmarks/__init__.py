"""What `make bench` measures; the tests run it in small."""
