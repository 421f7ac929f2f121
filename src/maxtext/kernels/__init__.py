"""Operations with a fast path, each file with the plain reference beside it. They take arrays and plain settings."""
